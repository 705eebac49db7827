// Launches combine on GPUs.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_

#include <cuda_runtime.h>

#include "core/groups/combine_precision.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// All blocks of a kernel must be resident at once, with all other kernels that run, so use few
// blocks.
struct CombineGrid {
  int32_t reduce_blocks = 24;  // sum this rank's rows and send the sums; then help the sum blocks
  int32_t sum_blocks = 16;     // sum tokens from the sums that arrive
};

// Parameters of combine, and of dispatch's backward: a combine of d_recv that also carries
// d_weights.
struct CombineParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  OpCode op;  // kCombine or kDispatchBwd
  CallSizes sizes;
  RowType type;  // kF32, kBF16 or kF16
  int32_t row_bytes;
  CombinePrecision precision;
  LaneRoom room;           // also decides the number of passes of exact sums
  const void* rows;        // [C, H] type, device, written by XLA
  const float* weights;    // [C] f32, device, written by XLA: factors of rows; or null
  const float* d_weights;  // [C] f32, device, written by XLA, returned to their slots; or null
  Plan plan;
  void* tokens;           // [T, H] type or f32, device; all written, zeros for tokens without rows
  float* d_topk_weights;  // [T, K] f32, device; all written; null if d_weights is null
  CombineGrid grid;
  bool wide_tokens = false;  // true: tokens are f32, rows 16-bit; only with exact sums
};

// Sums the rows of each staged row in slot order, and stores the sum directly in the lane of the
// rank that the token came from. That rank adds up the sums of ranks in order, while they arrive.
// If a lane has no room for all exact sums in f32, the call takes two epochs, of half the tokens
// each.
cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
