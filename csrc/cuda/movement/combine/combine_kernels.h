// combine on GPUs.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_

#include <cuda_runtime.h>

#include "core/groups/combine_precision.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// All blocks of a kernel must be resident at once, next to whatever else runs, so keep them few.
struct CombineGrid {
  int32_t reduce_blocks = 24;  // sum rows here and send the sums; then they help the sum blocks
  int32_t sum_blocks = 16;     // sum tokens from sums that arrive
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
  LaneRoom room;           // also decides the passes of exact sums
  const void* rows;        // [C, H] type, device, written by XLA
  const float* weights;    // [C] f32, device, written by XLA: factors of rows; or null
  const float* d_weights;  // [C] f32, device, written by XLA, returned to their slots; or null
  Plan plan;
  void* tokens;           // [T, H] type or f32, device; all written, zeros without rows
  float* d_topk_weights;  // [T, K] f32, device; all written; null with d_weights
  CombineGrid grid;
  bool wide_tokens = false;  // tokens are f32 with 16-bit rows; only with exact sums
};

// Sums the rows of each staged row in slot order, and stores the sum straight to its source's lane.
// The source adds up the sums of ranks in order, while sums arrive. If a lane does not hold all
// exact sums in f32, they take two epochs of half the tokens each.
cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
