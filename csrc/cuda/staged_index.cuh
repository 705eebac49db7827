// Which staged row of which rank a token is, from the plan's dst_rank.
#ifndef EP_RUNTIME_CUDA_STAGED_INDEX_CUH_
#define EP_RUNTIME_CUDA_STAGED_INDEX_CUH_

#include "cuda/call.cuh"

namespace ep_runtime {
namespace cuda {

constexpr int kMaxWarps = 32;

// Scratch of the group, in words.
__device__ __forceinline__ int32_t* ScratchHistograms(const Call& call) {
  return call.group->scratch;  // [kMaxPrepareBlocks, E]
}
__device__ __forceinline__ int32_t* ScratchBlockCounts(const Call& call) {
  return call.group->scratch + kMaxPrepareBlocks * call.group->num_experts;  // [3][blocks][ranks]
}
__device__ __forceinline__ int32_t* StagedTable(const Call& call) {
  return ScratchBlockCounts(call) + 3 * kMaxBlocks * kMaxRanks;  // [T, N]
}

struct StagedIndexShared {
  int32_t warp_counts[kMaxWarps][kMaxRanks];
  int32_t base[kMaxRanks];
};

// Bit r: a slot of the token keeps a row on rank r.
__device__ inline uint32_t RanksOfToken(const int32_t* dst_rank, int top_k, int ranks) {
  uint32_t mask = 0;
  for (int k = 0; k < top_k; ++k) {
    const int32_t rank = dst_rank[k];
    if (rank >= 0 && rank < ranks) mask |= 1u << rank;
  }
  return mask;
}

// Lane r gets how many of the warp's tokens in [first, last) rank r keeps.
__device__ inline int32_t CountTokens(const Call& call, const int32_t* dst_rank, int top_k,
                                      int first, int last) {
  const int lane = threadIdx.x % 32;
  int32_t count = 0;
  for (int start = first; start < last; start += blockDim.x) {
    const int token = start + static_cast<int>(threadIdx.x);
    const uint32_t mask =
        token < last ? RanksOfToken(dst_rank + int64_t{token} * top_k, top_k, call.ranks) : 0;
    for (int rank = 0; rank < call.ranks; ++rank) {
      const int32_t found = __popc(__ballot_sync(~0u, mask >> rank & 1));
      if (lane == rank) count += found;
    }
  }
  return count;
}

// Writes table[token, rank] = number of the token among those of [begin, end) that rank keeps, -1
// where it keeps none. `blocks` blocks share the work, this one is number `block`; uses barriers 0
// and 1. False: the call failed.
__device__ inline bool IndexTokens(const Call& call, StagedIndexShared* shared,
                                   const int32_t* dst_rank, int top_k, int begin, int end,
                                   int block, int blocks) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int64_t tokens = end - begin;
  const int first = begin + static_cast<int>(tokens * block / blocks);
  const int last = begin + static_cast<int>(tokens * (block + 1) / blocks);
  int32_t* table = StagedTable(call);
  int32_t* counts = ScratchBlockCounts(call);

  shared->warp_counts[warp][lane] = CountTokens(call, dst_rank, top_k, first, last);
  __syncthreads();
  if (warp == 0) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared->warp_counts[w][lane];
    counts[block * kMaxRanks + lane] = sum;
  }
  if (!MeetBlocks(call, 0, blocks)) return false;
  if (warp == 0) {
    int32_t sum = 0;
    for (int b = 0; b < block; ++b) sum += __ldcg(&counts[b * kMaxRanks + lane]);
    shared->base[lane] = sum;
  }
  __syncthreads();
  for (int start = first; start < last; start += blockDim.x) {
    const int token = start + static_cast<int>(threadIdx.x);
    const uint32_t mask =
        token < last ? RanksOfToken(dst_rank + int64_t{token} * top_k, top_k, call.ranks) : 0;
    for (int rank = 0; rank < call.ranks; ++rank) {
      const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
      if (lane == 0) shared->warp_counts[warp][rank] = __popc(found);
    }
    __syncthreads();
    for (int rank = 0; rank < call.ranks; ++rank) {
      const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
      int32_t before = shared->base[rank];
      for (int w = 0; w < warp; ++w) before += shared->warp_counts[w][rank];
      before += __popc(found & ((1u << lane) - 1));
      if (token < last) {
        table[int64_t{token} * call.ranks + rank] = (mask >> rank & 1) != 0 ? before : -1;
      }
    }
    __syncthreads();
    if (warp == 0) {
      for (int w = 0; w < warps; ++w) {
        shared->base[lane] += lane < call.ranks ? shared->warp_counts[w][lane] : 0;
      }
    }
    __syncthreads();
  }
  return MeetBlocks(call, 1, blocks);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_STAGED_INDEX_CUH_
