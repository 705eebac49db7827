// Writes zeros to the rows of a slab that no entry fills: padding, and rows past the last zone.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_EMPTY_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_EMPTY_ROWS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/warp_scan.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

constexpr int kZeroBytes = 8192;        // at the start of a block's dynamic shared memory
constexpr int kEmptyRowsPerTicket = 2;  // few, so that all warps share them

// Every thread calls this, and syncs with its block before the copy engine reads the zeros.
__device__ inline void ClearZeros(uint8_t* zeros, uint32_t* filled) {
  if (threadIdx.x == 0) *filled = 0;
  auto* words = reinterpret_cast<uint4*>(zeros);
  for (int i = threadIdx.x; i < kZeroBytes / 16; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
  FenceProxyAsync();
}

// Finds empty rows by number: padding in order of experts, then the rows past the last zone. The
// whole warp calls this, with increasing numbers.
struct EmptyRows {
  const Plan& plan;
  const CallSizes& sizes;
  int first = -32;         // expert of lane 0
  int32_t kept = 0;        // rows of a lane's expert
  int32_t padding = 0;     // padding of a lane's expert
  int32_t pad_before = 0;  // padding of earlier lanes
  int32_t row_before = 0;
  int32_t lanes_padding = 0;  // padding of all lanes
  int32_t lanes_rows = 0;
  int32_t base = 0;  // first row of lane 0's expert
  int32_t seen = 0;  // padding of experts before lane 0's

  __device__ EmptyRows(const Plan& p, const CallSizes& s) : plan(p), sizes(s) {}

  // Whether the last row found is in a zone.
  __device__ bool InZones() const { return first < sizes.experts; }
  __device__ int32_t Row(int32_t number) {
    while (InZones() && number - seen >= lanes_padding) {
      base += lanes_rows;
      seen += lanes_padding;
      Read();
    }
    if (!InZones()) return base + min(number - seen, sizes.capacity - base);
    const int32_t at = number - seen;
    const int owner = __ffs(__ballot_sync(~0u, at < pad_before + padding)) - 1;
    return base + __shfl_sync(~0u, row_before + kept - pad_before, owner) + at;
  }
  // Returns the end of the last zone. Call this after all rows are found.
  __device__ int32_t End() { return Row(0x7FFFFFFF), base; }

 private:
  // Moves on to the next 32 experts.
  __device__ void Read() {
    const int lane = threadIdx.x % 32;
    first += 32;
    const bool real = first + lane < sizes.experts;
    kept = real ? plan.kept[first + lane] : 0;
    int32_t size = real ? plan.group_sizes[first + lane] : 0;
    // A plan is an ordinary array, so check its numbers before writing to rows that they name.
    if (kept < 0 || size < kept || size > sizes.capacity - base) kept = size = 0;
    padding = size - kept;
    row_before = Before(size, sizes.capacity - base, &lanes_rows);
    // An expert past the slab's end has neither rows nor padding.
    if (row_before + size > sizes.capacity - base) kept = padding = 0;
    pad_before = Before(padding, sizes.capacity, &lanes_padding);
  }
  // Returns the sum over earlier lanes, and sets `all` to the sum over all lanes; both at most
  // `most`.
  __device__ static int32_t Before(int32_t value, int32_t most, int32_t* all) {
    const auto sum = WarpScan(int64_t{value});
    *all = static_cast<int32_t>(min(__shfl_sync(~0u, sum, 31), int64_t{most}));
    return static_cast<int32_t>(min(sum - value, int64_t{most}));
  }
};

// Arrays of a slab. Scales at the end of rows go to a separate array.
struct SlabArrays {
  uint8_t* data;    // [C, row_bytes - scale_bytes]
  uint8_t* scales;  // [C, scale_bytes]
  int32_t row_bytes;
  int32_t scale_bytes;

  __device__ int32_t DataBytes() const { return row_bytes - scale_bytes; }
  // Copies bytes [at, at + bytes) of a row from shared memory. One thread calls this.
  __device__ void Store(int64_t row, int32_t at, const uint8_t* from, int32_t bytes) const {
    const int32_t left = DataBytes() - at;  // data bytes from `at` on
    if (left > 0) BulkStore(data + row * DataBytes() + at, from, min(bytes, left));
    if (bytes <= left) return;
    const int32_t before = max(left, 0);
    BulkStore(scales + row * scale_bytes + (before - left), from + before, bytes - before);
  }
};

struct EmptyJob {
  SlabArrays rows;
  float* weights;   // [C] or null
  bool past_zones;  // true: rows past the last zone become zero too
};

// Writes zeros to empty rows until none is left. Every warp calls this when it has nothing else to
// do. `filled`, in shared memory, is set once a warp has found none left.
__device__ inline void FillEmptyRows(const DeviceCall& call, const Plan& plan,
                                     const CallSizes& sizes, const EmptyJob& job,
                                     const uint8_t* zeros, uint32_t* filled) {
  const int lane = threadIdx.x % 32;
  EmptyRows empty(plan, sizes);
  bool more = __shfl_sync(~0u, lane == 0 ? atomicOr(filled, 0u) : 0u, 0) == 0;
  while (more) {
    const auto number = static_cast<int32_t>(TakeTicket(call, kEmptyTicket)) * kEmptyRowsPerTicket;
    for (int i = 0; more && i < kEmptyRowsPerTicket; ++i) {
      const int64_t row = empty.Row(number + i);
      more = row < sizes.capacity && (job.past_zones || empty.InZones());
      if (!more || lane != 0) continue;
      if (job.weights != nullptr) job.weights[row] = 0.0f;
      for (int32_t at = 0; at < job.rows.row_bytes; at += kZeroBytes) {
        job.rows.Store(row, at, zeros, min(kZeroBytes, job.rows.row_bytes - at));
      }
      CommitStores();
      // Arriving rows share the copy engine, so they must not queue behind many of these stores.
      WaitStoresRead<2>();
    }
  }
  if (lane == 0) {
    atomicOr(filled, 1u);
    WaitStores<0>();
  }
  __syncwarp();
}

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_EMPTY_ROWS_CUH_
