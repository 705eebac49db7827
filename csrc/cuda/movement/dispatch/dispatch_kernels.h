// Launches dispatch and combine's backward on GPUs.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// All blocks of a kernel must be resident at once, with all other kernels that run, so use few
// blocks.
struct DispatchGrid {
  int32_t push_blocks = 12;  // few blocks fill a link; the slab gets three times a link's bytes
  int32_t place_blocks = 28;
  int32_t warps = 14;  // warps of a block; fewer if their buffers do not fit
};

struct DispatchParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  RowType type;
  int32_t row_bytes;     // H * element bytes, plus scale_bytes; a multiple of 16
  const void* tokens;    // [T, H] type, device, written by XLA
  const float* weights;  // [T, K] f32, device, written by XLA; null: weights of 1
  Plan plan;
  void* recv;           // [C, H] type, device; written: rows, and zeros in padding
  float* recv_weights;  // [C] f32, device; all written, zeros if there is no row
  DispatchGrid grid;
  LaneRoom room;
  // If rows end with scales, `type` is kBytes, scales go to recv_scale, and `recv` is [C, row_bytes
  // - scale_bytes].
  int32_t scale_bytes = 0;     // scales' share of row_bytes, a multiple of 16; 0: rows have none
  void* recv_scale = nullptr;  // [C, scale_bytes], device; written like `recv`
};

// Sends each token once to every rank that keeps a row of it, and places rows while they arrive. A
// packed call makes one launch for each possible part.
cudaError_t LaunchDispatch(cudaStream_t stream, const DispatchParams& params);

struct CombineBwdParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  RowType type;  // kF32, kBF16 or kF16; kBytes if rows end with scales; expert_out and weights are
                 // then null
  int32_t row_bytes;
  const void* grad;        // [T, H] type, device, written by XLA
  const void* expert_out;  // [C, H] type, device, written by XLA; null: no d_weights
  const float* weights;    // [C] f32, device, written by XLA; null: weights of 1
  Plan plan;
  // With `clear_slack` both arrays get zeros past the last zone, otherwise nothing is written
  // there.
  void* d_expert_out;  // [C, H] type, device; written: weight * grad, zeros in padding
  float* d_weights;    // [C] f32, device; written likewise; null if expert_out is null
  DispatchGrid grid;
  LaneRoom room;
  bool clear_slack = true;
  int32_t scale_bytes = 0;  // like DispatchParams::scale_bytes
  void* d_scale = nullptr;  // [C, scale_bytes], device
};

// Dispatches the gradient: the gradient of a row is weight * grad, the gradient of its weight is
// grad . expert_out.
cudaError_t LaunchCombineBwd(cudaStream_t stream, const CombineBwdParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_
