// EP_RUNTIME_DEBUG=1: finds expert indices that name no expert. Their slots stay unused, so that
// the ranks' calls still complete. Outputs of later calls become NaN, and the index is reported to
// the host.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_CHECK_INDICES_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_CHECK_INDICES_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/prepare/prepare_kernels.h"

namespace ep_runtime {
namespace cuda {
namespace prepare {

// Checks this rank's indices. Every thread of prepare's kernel calls this.
__device__ inline void CheckIndices(const DeviceCall& call, const PrepareParams& params,
                                    int num_experts) {
  DeviceGroup* group = call.group;
  const int64_t slots = int64_t{params.sizes.tokens} * params.sizes.top_k;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots; i += stride) {
    const int32_t expert = params.topk_idx[i];
    if (expert >= -1 && expert < num_experts) continue;
    if (atomicCAS(&group->spoiled, 0u, 1u) != 0) return;
    volatile BadIndex* record = group->bad_index;
    record->token = static_cast<int32_t>(i / params.sizes.top_k);
    record->slot = static_cast<int32_t>(i % params.sizes.top_k);
    record->value = expert;
    record->layer_id = call.layer_id;
    __threadfence_system();
    record->valid = 1;
    return;
  }
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_CHECK_INDICES_CUH_
