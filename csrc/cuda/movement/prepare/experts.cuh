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

// Arrays over experts, in dynamic shared memory. P counts physical experts: a rank's L own ones,
// followed by its S slots for copies.
struct Experts {
  int local;        // L
  int spare;        // S
  int ranks;        // N
  int32_t* demand;  // [E] rows demanded by all sources
  int32_t* kept;    // [E] rows kept
  int32_t* first;   // [E] rows of earlier sources and of this rank's earlier blocks
  int32_t* base;    // [P] first row of the physical expert in its rank's slab
  int32_t* rows;    // [P] rows of the physical expert; without slots `kept`
  // Only with slots:
  int32_t* next;   // [P] the physical expert that gets an expert's rows after this one's; -1: none
  int32_t* slots;  // [N * S] expert of each slot, -1: none
  int32_t* order;  // [E] a rank's experts, those that keep most rows first: numbers in the rank
  int32_t* ends;   // [E] rows of experts up to here, in this order
  uint16_t* counts;  // [kWarps, E] slots of each warp, later of all earlier warps

  static size_t Bytes(int experts, int slots) {
    const int64_t words = 4 * int64_t{experts} + (slots > 0 ? 4 * experts + 4 * slots : 0);
    return AlignUp(words * 4 + int64_t{experts} * kWarps * 2, 16);
  }
  __device__ Experts(uint8_t* shared, const PrepareParams& params)
      : local(params.sizes.experts), spare(params.spread.spare), ranks(params.num_experts / local) {
    const int experts = params.num_experts, physical = experts + ranks * spare;
    demand = reinterpret_cast<int32_t*>(shared);
    kept = demand + experts;
    first = kept + experts;
    base = first + experts;
    int32_t* end = base + physical;
    rows = kept;
    next = slots = order = ends = nullptr;
    if (spare > 0) {
      rows = end;
      next = rows + physical;
      slots = next + physical;
      order = slots + ranks * spare;
      ends = order + experts;
      end = ends + experts;
    }
    counts = reinterpret_cast<uint16_t*>(end);
  }

  __device__ int physical() const { return local + spare; }  // experts of a rank
  // Returns the physical expert of an expert at home.
  __device__ int Home(int expert) const {
    return spare == 0 ? expert : expert + expert / local * spare;
  }
};

// Returns the rows that a rank's experts may keep.
__device__ inline int32_t MostKept(const PrepareParams& params) {
  return params.spread.spare > 0 ? params.spread.most_kept : params.sizes.capacity;
}

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
