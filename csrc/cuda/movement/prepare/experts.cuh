// Counts of a block of prepare, and the tokens that its warps own.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXPERTS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXPERTS_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/prepare/prepare_kernels.h"

namespace ep_runtime {
namespace cuda {
namespace prepare {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// Arrays over experts, in dynamic shared memory.
struct Experts {
  int32_t* demand;   // [E] rows demanded by all sources
  int32_t* kept;     // [E] rows kept
  int32_t* base;     // [E] first row of the expert in its rank's slab
  int32_t* first;    // [E] rows of earlier sources and of this rank's earlier blocks
  int32_t* sources;  // [E] rows of earlier sources only
  uint16_t* counts;  // [kWarps, E] slots of each warp, later of all earlier warps

  static size_t Bytes(int experts) { return AlignUp(experts * int64_t{5 * 4 + kWarps * 2}, 16); }
  __device__ Experts(uint8_t* shared, int experts) {
    demand = reinterpret_cast<int32_t*>(shared);
    kept = demand + experts;
    base = kept + experts;
    first = base + experts;
    sources = first + experts;
    counts = reinterpret_cast<uint16_t*>(sources + experts);
  }
};

// A warp's tokens, which are consecutive: no other warp or block has slots in between.
struct TokenRange {
  int32_t begin;
  int32_t end;
  __device__ TokenRange(int64_t tokens, int part, int parts)
      : begin(static_cast<int32_t>(tokens * part / parts)),
        end(static_cast<int32_t>(tokens * (part + 1) / parts)) {}
};

__device__ inline int ExpertOf(const PrepareParams& params, int64_t slot, int64_t end,
                               int num_experts) {
  const int32_t expert = slot < end ? params.topk_idx[slot] : -1;
  return expert >= 0 && expert < num_experts ? expert : -1;
}

// Counts the experts of a warp's lanes, -1 for none. Call this with whole warps.
__device__ inline void CountExperts(int expert, uint16_t* counts) {
  const uint32_t same = __match_any_sync(~0u, expert);
  if (expert >= 0 && static_cast<int>(threadIdx.x % 32) == __ffs(same) - 1) {
    counts[expert] = static_cast<uint16_t>(counts[expert] + __popc(same));
  }
  __syncwarp();
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXPERTS_CUH_
