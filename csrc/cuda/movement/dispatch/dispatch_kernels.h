#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// All blocks of a kernel must be resident at once, beside whatever else runs: keep them few.
struct DispatchGrid {
  int32_t push_blocks = 12;  // a link needs few; the slab takes three times a link's bytes
  int32_t place_blocks = 28;
  int32_t warps = 14;  // of a block; fewer where their buffers do not fit
};

struct DispatchParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  RowType type;
  int32_t row_bytes;     // H * element bytes, a multiple of 16; with scales behind them, theirs too
  const void* tokens;    // [T, H] type, device, written by XLA
  const float* weights;  // [T, K] f32, device, written by XLA; null: weights of 1
  Plan plan;
  void* recv;           // [C, H] type, device; written: rows, and zeros in padding
  float* recv_weights;  // [C] f32, device; written whole, zeros where no row is
  DispatchGrid grid;
  LaneRoom room;
  // Rows that end with scales, `type` kBytes: these go to an array of their own, and `recv` is
  // [C, row_bytes - scale_bytes].
  int32_t scale_bytes = 0;     // of row_bytes, a multiple of 16; 0: rows have none
  void* recv_scale = nullptr;  // [C, scale_bytes], device; likewise
};

// Sends each token once to every rank that keeps a row of it; placement runs while rows arrive. Of
// packed calls one launch for each part that there may be.
cudaError_t LaunchDispatch(cudaStream_t stream, const DispatchParams& params);

struct CombineBwdParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  RowType type;  // kF32, kBF16 or kF16; of rows that end with scales kBytes, with neither
                 // expert_out nor weights
  int32_t row_bytes;
  const void* grad;        // [T, H] type, device, written by XLA
  const void* expert_out;  // [C, H] type, device, written by XLA; null: no d_weights
  const float* weights;    // [C] f32, device, written by XLA; null: weights of 1
  Plan plan;
  // Past the last zone both hold zeros, or without `clear_slack` what was there.
  void* d_expert_out;  // [C, H] type, device; written: weight * grad, zeros in padding
  float* d_weights;    // [C] f32, device; written likewise; null with expert_out
  DispatchGrid grid;
  LaneRoom room;
  bool clear_slack = true;
  int32_t scale_bytes = 0;  // as of dispatch
  void* d_scale = nullptr;  // [C, scale_bytes], device
};

// A dispatch of the gradient: a row's is weight * grad, its weight's is grad . expert_out.
cudaError_t LaunchCombineBwd(cudaStream_t stream, const CombineBwdParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_DISPATCH_KERNELS_H_
