#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

struct PrepareParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  int32_t num_experts;      // E of the EP group, at most kMaxExperts
  int32_t alignment;        // rows; every expert's zone is a multiple of it, held against C
  int32_t row_alignment;    // and of this one as it lies in the slab; it divides the other
  const int32_t* topk_idx;  // [T, K] int32, device, written by XLA; anything else than an expert of
                            // the EP group is an unused slot
  MutablePlan plan;         // written whole
  DeviceVerdict* verdict;   // [1] device or host-mapped; null: on_overflow="drop", no exchange
  int32_t blocks = 32;      // at most, and one more; of kMaxPrepareBlocks, all resident at once
  LaneRoom room{};          // says whether recv_count has the counts of all pairs of ranks
  int32_t* most = nullptr;  // [1] device: rows of the zones of the fullest slab of all; or null
};

// Routes this rank's slots: counts travel to all peers, then one entry per kept row to the rank
// that gets it. All ranks take the same decisions from the same count matrix.
cudaError_t LaunchPrepare(cudaStream_t stream, PrepareParams params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_
