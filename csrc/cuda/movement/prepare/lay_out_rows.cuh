// Phase 3 of prepare: computes from the count matrix how many rows every expert keeps, and where.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_LAY_OUT_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_LAY_OUT_ROWS_CUH_

#include "cuda/movement/call/warp_scan.cuh"
#include "cuda/movement/prepare/spread_rows.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

__device__ inline int32_t UpTo(int32_t value, int32_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Returns the aligned rows of one rank's experts if each keeps at most `level` rows.
__device__ inline int64_t Zones(const int32_t* demand, int experts, int64_t level,
                                int32_t alignment) {
  int64_t rows = 0;
  for (int e = threadIdx.x % 32; e < experts; e += 32) {
    rows += UpTo(static_cast<int32_t>(min(int64_t{demand[e]}, level)), alignment);
  }
  for (int step = 16; step > 0; step /= 2) rows += __shfl_xor_sync(~0u, rows, step);
  return rows;
}

// Applies the rule of KeptRows in core/memory/plan.cc. One warp calls this.
__device__ inline void KeepRows(const int32_t* demand, int experts, int32_t capacity,
                                int32_t alignment, int32_t* kept) {
  const int lane = threadIdx.x % 32;
  int32_t most = 0;
  for (int e = lane; e < experts; e += 32) most = max(most, demand[e]);
  most = __reduce_max_sync(~0u, most);
  if (Zones(demand, experts, most, alignment) <= capacity) {
    for (int e = lane; e < experts; e += 32) kept[e] = demand[e];
    return;
  }
  int32_t low = 0;
  int32_t high = most / alignment + 1;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (Zones(demand, experts, int64_t{middle} * alignment, alignment) <= capacity ? low : high) =
        middle;
  }
  const int32_t level = low * alignment;
  // The first experts above the level get one more block each, while blocks are left.
  int32_t left =
      static_cast<int32_t>(capacity - Zones(demand, experts, level, alignment)) / alignment;
  for (int start = 0; start < experts; start += 32) {
    const int e = start + lane;
    const bool above = e < experts && demand[e] > level;
    const uint32_t which = __ballot_sync(~0u, above);
    const bool extra = above && __popc(which & ((1u << lane) - 1)) < left;
    left = max(left - __popc(which), 0);
    if (e < experts) kept[e] = min(demand[e], level + (extra ? alignment : 0));
  }
}

// Computes the same as LayOutRows of core/memory/plan.cc from the count matrix, and also where this
// block's rows start. With slots for copies, first spreads the rows.
__device__ inline void LayOutRows(const DeviceCall& call, const PrepareParams& params,
                                  const Experts& experts, int num_experts, SpreadShared* shared) {
  const int64_t stride = call.group->source_counts_bytes / 4;
  const int32_t* matrix = call.Counts(call.me, 0);
  const int32_t most = params.sizes.tokens * params.sizes.top_k;  // upper bound for counts that
                                                                  // peers wrote
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int32_t demand = 0;
    int32_t before = 0;
    for (int source = 0; source < call.ranks; ++source) {
      const int32_t count = min(max(__ldcg(&matrix[source * stride + e]), 0), most);
      before += source < call.me ? count : 0;
      demand += count;
    }
    experts.demand[e] = demand;
    experts.first[e] += before;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int rank = threadIdx.x / 32; rank < call.ranks; rank += kWarps) {
    const int start = rank * experts.local;
    KeepRows(experts.demand + start, experts.local, MostKept(params), params.alignment,
             experts.kept + start);
    __syncwarp();
  }
  if (experts.spare > 0) SpreadRows(experts, shared);
  const int local = experts.physical();
  for (int rank = threadIdx.x / 32; rank < call.ranks; rank += kWarps) {
    const int start = rank * local;
    int32_t base = 0;
    for (int at = 0; at < local; at += 32) {
      const bool real = at + lane < local;
      int32_t* rows = experts.rows + start + at + lane;
      const int32_t zone = real ? UpTo(*rows, params.row_alignment) : 0;
      const int32_t begin = base + WarpScan(zone) - zone;
      if (real) experts.base[start + at + lane] = begin;
      // Balanced rows fit, unless a peer wrote wrong counts.
      if (real && experts.spare > 0) *rows = max(min(*rows, params.sizes.capacity - begin), 0);
      base = __shfl_sync(~0u, begin + zone, 31);
    }
  }
  __syncthreads();
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_LAY_OUT_ROWS_CUH_
