// Phases 1 and 2 of prepare: counts how many slots choose each expert, on this rank and on every
// rank.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_COUNT_SLOTS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_COUNT_SLOTS_CUH_

#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/prepare/experts.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

// Counts the slots of each warp, and replaces the counts by sums over earlier warps. The block's
// counts go to the group's scratch.
__device__ inline void CountSlots(const DeviceCall& call, const PrepareParams& params,
                                  const Experts& experts, int num_experts,
                                  const TokenRange& range) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) experts.counts[i] = 0;
  __syncthreads();
  uint16_t* mine = experts.counts + warp * num_experts;
  const int64_t end = int64_t{range.end} * params.sizes.top_k;
  for (int64_t at = int64_t{range.begin} * params.sizes.top_k; at < end; at += 32) {
    CountExperts(ExpertOf(params, at + lane, end, num_experts), mine);
  }
  __syncthreads();
  int32_t* histogram = ScratchHistograms(call) + blockIdx.x * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = experts.counts[w * num_experts + e];
      experts.counts[w * num_experts + e] = static_cast<uint16_t>(sum);
      sum += count;
    }
    histogram[e] = experts.first[e] = sum;
  }
}

// Sums counts over blocks. The first block sends the count row to every rank, this one included.
__device__ inline void SendCounts(const DeviceCall& call, const PrepareParams& params,
                                  const Experts& experts, int num_experts) {
  const int32_t* histograms = ScratchHistograms(call);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    const int32_t own = experts.first[e];
    int32_t before = 0;
    int32_t all = 0;
#pragma unroll 8
    for (int b = 0; b < params.blocks; ++b) {
      const int32_t count = b == blockIdx.x ? own : __ldcg(&histograms[b * num_experts + e]);
      before += b < blockIdx.x ? count : 0;
      all += count;
    }
    experts.first[e] = before;
    if (blockIdx.x == 0) {
      for (int dest = 0; dest < call.ranks; ++dest) call.Counts(dest, call.me)[e] = all;
    }
  }
  if (blockIdx.x != 0) return;
  __syncthreads();
  if (threadIdx.x < call.ranks) StoreReleaseSys(call.CountsFlag(threadIdx.x, call.me), call.tag);
}

__device__ inline bool AwaitCounts(const DeviceCall& call) {
  bool alive = true;
  const int source = threadIdx.x;
  if (source < call.ranks) {
    alive = AwaitWord(call, call.CountsFlag(call.me, source), call.tag, source);
  }
  return __syncthreads_and(alive);
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_COUNT_SLOTS_CUH_
