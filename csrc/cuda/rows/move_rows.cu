// Gathers, spreads and sums rows of a permutation.
#include "cuda/movement/call/row_math.cuh"
#include "cuda/rows/move_rows.h"
#include "cuda/rows/row_groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kMaxThreads = 128;  // threads that share a row
constexpr int kUnroll = 4;        // vectors that a thread loads at once

// blockIdx.x is the row. Copies rows of any type bit by bit.
__global__ void __launch_bounds__(kMaxThreads)
    CopyKernel(const __grid_constant__ GatherRowsParams p) {
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const int32_t source = __ldg(p.source + blockIdx.x);
  const int32_t token = source < 0 ? p.tokens : source / p.slots;
  const bool filled = token < p.tokens;
  const auto* from = static_cast<const uint4*>(p.values) + (filled ? token : 0) * vectors;
  auto* to = static_cast<uint4*>(p.out) + blockIdx.x * vectors;
  for (int64_t base = threadIdx.x; base < vectors; base += kUnroll * blockDim.x) {
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = base + u * blockDim.x;
      part[u] = filled && v < vectors ? LoadStream(from + v) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = base + u * blockDim.x;
      if (v < vectors) StoreVector(to + v, part[u]);
    }
  }
}

// Returns the factor of the row of slot `at`.
template <typename Params>
__device__ __forceinline__ float SlotWeight(const Params& p, int32_t rows, bool there, int64_t at,
                                            int32_t row) {
  if (!there || p.weights == nullptr) return 1.0f;
  if (!p.row_weights) return __ldg(p.weights + at);
  return row >= 0 && row < rows ? __ldg(p.weights + row) : 1.0f;
}

// Stores a lane's vectors of a token to the rows of up to 32 slots, one slot in each lane. Call
// this with whole warps.
template <RowType kType>
__device__ __forceinline__ void StoreSlots(const SpreadRowsParams& p, const uint4* part, int64_t v,
                                           int32_t row, float weight) {
  const int64_t vectors = p.row_bytes / kVectorBytes;
  unsigned used = __ballot_sync(kAllLanes, row >= 0 && row < p.rows);
  while (used != 0) {
    const int slot = __ffs(used) - 1;
    used &= used - 1;
    auto* to = static_cast<uint4*>(p.out) + __shfl_sync(kAllLanes, row, slot) * vectors;
    const float times = __shfl_sync(kAllLanes, weight, slot);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = v + u * blockDim.x;
      if (at >= vectors) break;
      if constexpr (kType == RowType::kBytes) {
        StoreVector(to + at, part[u]);
      } else {
        using E = Element<kType>;
        float x[E::kPerVector];
        E::Unpack(part[u], x);
#pragma unroll
        for (int i = 0; i < E::kPerVector; ++i) x[i] = __fmul_rn(x[i], times);
        StoreVector(to + at, E::Pack(x));
      }
    }
  }
}

// Sets rows that no slot has to zero, among kMaxThreads rows from `first` on. Call this with whole
// blocks.
__device__ __forceinline__ void ClearUnused(const SpreadRowsParams& p, int64_t first) {
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const int64_t end = min(first + kMaxThreads, static_cast<int64_t>(p.rows));
  for (int64_t row = first; row < end; ++row) {
    if (__ldg(p.source + row) >= 0) continue;
    auto* to = static_cast<uint4*>(p.out) + row * vectors;
    for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      StoreVector(to + v, make_uint4(0, 0, 0, 0));
    }
    if (p.products != nullptr && threadIdx.x == 0) p.products[row] = 0.0f;
  }
}

// blockIdx.x is the token. Blocks past the last token look for unused rows, among kMaxThreads rows
// each.
template <RowType kType>
__global__ void __launch_bounds__(kMaxThreads)
    SpreadKernel(const __grid_constant__ SpreadRowsParams p) {
  if (blockIdx.x >= p.tokens) {
    ClearUnused(p, static_cast<int64_t>(blockIdx.x - p.tokens) * kMaxThreads);
    return;
  }
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.slots;
  const auto* from = static_cast<const uint4*>(p.values) + blockIdx.x * vectors;
  for (int64_t base = 0; base < vectors; base += kUnroll * blockDim.x) {
    const int64_t v = base + threadIdx.x;
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (v + u * blockDim.x < vectors) part[u] = LoadStream(from + v + u * blockDim.x);
    }
    for (int slots = 0; slots < p.slots; slots += 32) {
      const bool there = slots + lane < p.slots;
      const int64_t at = first + slots + lane;
      const int32_t row = there ? __ldg(p.slot_row + at) : -1;
      const float weight = SlotWeight(p, p.rows, there, at, row);
      StoreSlots<kType>(p, part, v, row, weight);
    }
  }
}

// Sums all threads' values in a fixed order; thread 0 gets the sum. Call this with whole blocks.
__device__ __forceinline__ float BlockSum(float sum) {
  __shared__ float of_warps[kMaxThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return sum;
  for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
  return sum;
}

// Writes a token's row times its weight, and the dot product of the row with another row. Writes
// zeros if there is no token. Call this with whole blocks.
template <RowType kType, typename Params>
__device__ __forceinline__ void WeighRow(const Params& p, int64_t row, int32_t source,
                                         int64_t weight_at) {
  using E = Element<kType>;
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const int32_t token = source < 0 ? p.tokens : source / p.slots;
  const bool filled = token < p.tokens;
  const float weight = filled && p.weights != nullptr ? __ldg(p.weights + weight_at) : 1.0f;
  const auto* from = static_cast<const uint4*>(p.values) + (filled ? token : 0) * vectors;
  const auto* other = static_cast<const uint4*>(p.others) + row * vectors;
  auto* to = static_cast<uint4*>(p.out) + row * vectors;
  float product = 0.0f;
  for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    if (!filled) {
      StoreVector(to + v, make_uint4(0, 0, 0, 0));
      continue;
    }
    float x[E::kPerVector], y[E::kPerVector];
    const uint4 part = LoadStream(from + v);
    if (p.others != nullptr) E::Unpack(LoadStream(other + v), y);
    E::Unpack(part, x);
#pragma unroll
    for (int i = 0; i < E::kPerVector; ++i) {
      if (p.others != nullptr) product += x[i] * y[i];
      x[i] = __fmul_rn(x[i], weight);
    }
    // Without weights, rows are copied bit by bit, including NaNs.
    StoreVector(to + v, p.weights != nullptr ? E::Pack(x) : part);
  }
  if (p.products == nullptr) return;
  product = BlockSum(product);
  if (threadIdx.x == 0) p.products[row] = product;
}

// blockIdx.x is the row.
template <RowType kType>
__global__ void __launch_bounds__(kMaxThreads)
    WeighKernel(const __grid_constant__ GatherRowsParams p) {
  const int32_t source = __ldg(p.source + blockIdx.x);
  WeighRow<kType>(p, blockIdx.x, source, source);
}

// blockIdx.x is the slot. Slots of a token follow each other, so that the token's row is in L2 for
// all but the first. Blocks past the last slot look for unused rows, among kMaxThreads rows each.
template <RowType kType>
__global__ void __launch_bounds__(kMaxThreads)
    CompareKernel(const __grid_constant__ SpreadRowsParams p) {
  const int64_t slots = static_cast<int64_t>(p.tokens) * p.slots;
  if (blockIdx.x >= slots) {
    ClearUnused(p, (blockIdx.x - slots) * kMaxThreads);
    return;
  }
  const int32_t row = __ldg(p.slot_row + blockIdx.x);
  if (row < 0 || row >= p.rows) return;
  const int64_t weight_at = p.row_weights ? row : int64_t{blockIdx.x};
  WeighRow<kType>(p, row, static_cast<int32_t>(blockIdx.x), weight_at);
}

// Adds the rows of up to 32 slots, one in each lane, to `total`. Call this with whole warps.
template <RowType kType>
__device__ __forceinline__ void AddSlots(const SumRowsParams& p, int32_t row, float weight,
                                         int64_t v, float* total) {
  using E = Element<kType>;
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const auto* rows = static_cast<const uint4*>(p.rows);
  unsigned used = __ballot_sync(kAllLanes, row >= 0 && row < p.num_rows);
  while (used != 0) {
    uint4 part[kUnroll];
    float times[kUnroll];
    int count = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (used == 0) break;
      const int slot = __ffs(used) - 1;
      used &= used - 1;
      const int64_t at = __shfl_sync(kAllLanes, row, slot);
      times[u] = __shfl_sync(kAllLanes, weight, slot);
      if (v < vectors) part[u] = LoadStream(rows + at * vectors + v);
      count = u + 1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= count || v >= vectors) break;
      float x[E::kPerVector];
      E::Unpack(part[u], x);
#pragma unroll
      for (int i = 0; i < E::kPerVector; ++i) {
        const float scaled = p.weights != nullptr ? __fmul_rn(x[i], times[u]) : x[i];
        total[i] = __fadd_rn(total[i], scaled);
      }
    }
  }
}

// blockIdx.x is the token. Each lane reads a slot and sums some of the vectors.
template <RowType kType>
__global__ void __launch_bounds__(kMaxThreads) SumKernel(const __grid_constant__ SumRowsParams p) {
  using E = Element<kType>;
  const int64_t vectors = p.row_bytes / kVectorBytes;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.slots;
  for (int64_t base = threadIdx.x - lane; base < vectors; base += blockDim.x) {
    float total[E::kPerVector];
#pragma unroll
    for (int i = 0; i < E::kPerVector; ++i) total[i] = 0.0f;
    for (int slots = 0; slots < p.slots; slots += 32) {
      const bool there = slots + lane < p.slots;
      const int64_t at = first + slots + lane;
      const int32_t row = there ? __ldg(p.slot_row + at) : -1;
      const float weight = SlotWeight(p, p.num_rows, there, at, row);
      AddSlots<kType>(p, row, weight, base + lane, total);
    }
    if (base + lane < vectors) {
      StoreVector(static_cast<uint4*>(p.out) + blockIdx.x * vectors + base + lane, E::Pack(total));
    }
  }
}

bool FitsRows(int64_t row_bytes, const void* a, const void* b, const void* c) {
  return row_bytes > 0 && row_bytes % kVectorBytes == 0 && Aligned(a) && Aligned(b) && Aligned(c);
}

}  // namespace
}  // namespace rows

cudaError_t LaunchGatherRows(cudaStream_t stream, const GatherRowsParams& p) {
  if (!rows::FitsRows(p.row_bytes, p.values, p.others, p.out) || p.rows <= 0 || p.tokens <= 0 ||
      p.slots <= 0 || (p.others == nullptr) != (p.products == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const int threads = rows::ThreadsFor(p.row_bytes / rows::kVectorBytes, rows::kMaxThreads);
  if (p.weights == nullptr && p.others == nullptr) {
    rows::CopyKernel<<<p.rows, threads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  return rows::LaunchForFloat(p.type, [&](auto type) {
    rows::WeighKernel<decltype(type)::value><<<p.rows, threads, 0, stream>>>(p);
  });
}

namespace rows {
namespace {

template <RowType kType>
void LaunchSpread(cudaStream_t stream, const SpreadRowsParams& p, unsigned grid, int threads) {
  if constexpr (kType != RowType::kBytes) {
    if (p.others != nullptr) {
      CompareKernel<kType><<<grid, threads, 0, stream>>>(p);
      return;
    }
  }
  SpreadKernel<kType><<<grid, threads, 0, stream>>>(p);
}

}  // namespace
}  // namespace rows

cudaError_t LaunchSpreadRows(cudaStream_t stream, const SpreadRowsParams& p) {
  const bool compared = p.others != nullptr;
  const int64_t looked =
      p.source == nullptr ? 0 : (int64_t{p.rows} + rows::kMaxThreads - 1) / rows::kMaxThreads;
  const int64_t blocks = static_cast<int64_t>(p.tokens) * (compared ? p.slots : 1) + looked;
  if (!rows::FitsRows(p.row_bytes, p.values, p.others, p.out) || p.rows <= 0 || p.tokens <= 0 ||
      p.slots <= 0 || blocks >= rows::kMaxRows || compared != (p.products != nullptr)) {
    return cudaErrorInvalidValue;
  }
  const int threads = rows::ThreadsFor(p.row_bytes / rows::kVectorBytes, rows::kMaxThreads);
  const auto grid = static_cast<unsigned>(blocks);
  // Without weights, rows are copied bit by bit, including NaNs.
  switch (p.weights == nullptr && !compared ? RowType::kBytes : p.type) {
    case RowType::kBytes:
      if (compared) return cudaErrorInvalidValue;
      rows::LaunchSpread<RowType::kBytes>(stream, p, grid, threads);
      break;
    case RowType::kF32:
      rows::LaunchSpread<RowType::kF32>(stream, p, grid, threads);
      break;
    case RowType::kBF16:
      rows::LaunchSpread<RowType::kBF16>(stream, p, grid, threads);
      break;
    case RowType::kF16:
      rows::LaunchSpread<RowType::kF16>(stream, p, grid, threads);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t LaunchSumRows(cudaStream_t stream, const SumRowsParams& p) {
  if (!rows::FitsRows(p.row_bytes, p.rows, p.out, nullptr) || p.tokens <= 0 || p.slots <= 0 ||
      p.num_rows <= 0) {
    return cudaErrorInvalidValue;
  }
  const int threads = rows::ThreadsFor(p.row_bytes / rows::kVectorBytes, rows::kMaxThreads);
  return rows::LaunchForFloat(p.type, [&](auto type) {
    rows::SumKernel<decltype(type)::value><<<p.tokens, threads, 0, stream>>>(p);
  });
}

}  // namespace cuda
}  // namespace ep_runtime
