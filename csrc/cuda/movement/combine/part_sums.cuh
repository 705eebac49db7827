// Item: the parts that one warp sums. Sent: the format that sums travel in. PartRing: the buffers
// that parts are loaded into.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/row_math.cuh"
#include "cuda/movement/combine/fp8_parts.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr int kVectors = 4;                      // vectors of a row that a lane sums at a time
constexpr int kPieceBytes = 32 * 16 * kVectors;  // bytes of a row that a warp sums at a time
constexpr int kRingBytes = 12 * 1024;            // bytes of one warp's ring
constexpr int kMaxSlots = kRingBytes / kPieceBytes;

// The parts that one warp sums: rows of this rank in slot order, and partial sums of other ranks
// before and after them in rank order. Lane i holds the i-th part.
struct Item {
  const uint8_t* part;
  float weight;
  uint32_t own;  // bit i: the part is a row of this rank
  int count;
  uint8_t* out;
  int32_t rank;    // the peer that gets the sum; for a token, in lane k: rank of slot k
  int32_t staged;  // the peer's staged row; for a token, in lane r: staged row on rank r
  int32_t slot;    // lane i: slot of the i-th part's row
  int32_t row;     // lane i: row of the i-th part
  int32_t token;
  int32_t slice;  // number of the slice, of the row's `slices`

  // First and end of the pieces that this item sums.
  __device__ int First(int pieces, int slices) const { return pieces * slice / slices; }
  __device__ int End(int pieces, int slices) const { return pieces * (slice + 1) / slices; }
};

// A warp's place in the list of its loads: parts of one piece, parts of the next one, ...
struct Cursor {
  int piece;
  int part;
  __device__ bool Done(const Item& item, int end) const { return item.count == 0 || piece >= end; }
  __device__ void Advance(const Item& item) {
    if (++part < item.count) return;
    part = 0;
    ++piece;
  }
};

// The format in which a sum is sent to another rank. kPer: values in one 16-byte vector.
template <RowType kType, CombinePrecision kPrecision>
struct Sent {
  static constexpr int kPer = Element<kType>::kPerVector;
  static constexpr bool kWide = kPrecision == CombinePrecision::kExact && kPer == 8;
  static constexpr bool kFp8 = kPrecision == CombinePrecision::kFp8;
  static constexpr int kPieceValues = kPieceBytes / 16 * kPer;

  // Returns the size that `row_bytes` of a row have when sent. They are whole pieces, or whole
  // pieces and a rest.
  __device__ static int64_t Bytes(int64_t row_bytes) {
    if constexpr (kFp8) return Fp8Bytes(static_cast<int32_t>(row_bytes / 16) * kPer, kPieceValues);
    return row_bytes * (kWide ? 2 : 1);
  }
};

// Loads parts for one warp, several parts ahead of their use. The lane that holds a part loads it.
template <RowType kType, CombinePrecision kPrecision>
struct PartRing {
  using SentSum = Sent<kType, kPrecision>;
  static constexpr int kSlotBytes = kPieceBytes * (SentSum::kWide ? 2 : 1);
  static constexpr int kSlots = kRingBytes / kSlotBytes;

  uint8_t* data;
  LoadBarrier* barriers;
  int row_bytes;
  bool wide_out;  // true: sums of own tokens are stored in f32; only with kExact
  int issued;
  int used;

  __device__ bool Full() const { return issued - used >= kSlots; }
  __device__ void Issue(const Item& item, const Cursor& at) {
    const int slot = issued++ % kSlots;
    if (static_cast<int>(threadIdx.x % 32) != at.part) return;
    int64_t offset = int64_t{at.piece} * kPieceBytes;
    int64_t bytes = min(kPieceBytes, row_bytes - static_cast<int>(offset));
    if ((item.own >> at.part & 1) == 0) {
      offset = SentSum::Bytes(offset);
      bytes = SentSum::Bytes(bytes);
    }
    barriers[slot].Load(data + slot * kSlotBytes, item.part + offset, static_cast<int>(bytes));
  }
  __device__ const uint8_t* Await() {
    const int slot = used % kSlots;
    barriers[slot].Wait(used / kSlots & 1);
    return data + slot * kSlotBytes;
  }
};

// Returns one warp's share of the block's rings, and initialises the warp's barriers.
template <RowType kType, CombinePrecision kPrecision>
__device__ PartRing<kType, kPrecision> MakeRing(uint8_t* rings, LoadBarrier* barriers,
                                                int row_bytes, bool wide_out) {
  const int warp = threadIdx.x / 32;
  PartRing<kType, kPrecision> ring{
      rings + warp * kRingBytes, barriers + warp * kMaxSlots, row_bytes, wide_out, 0, 0};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < ring.kSlots; ++i) ring.barriers[i].Init();
    FenceBarrierInit();
  }
  __syncwarp();
  return ring;
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_
