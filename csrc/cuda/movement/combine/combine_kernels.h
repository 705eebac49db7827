#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_

#include <cuda_runtime.h>

#include "core/groups/combine_precision.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// All blocks of a kernel must be resident at once, beside whatever else runs: keep them few.
struct CombineGrid {
  int32_t reduce_blocks = 24;  // sum rows here and send them; then they help the others
  int32_t sum_blocks = 16;     // sum what arrives
};

// combine, and dispatch's backward, which is a combine of d_recv that also carries d_weights.
struct CombineParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  OpCode op;  // kCombine or kDispatchBwd
  CallSizes sizes;
  RowType type;  // kF32, kBF16 or kF16
  int32_t row_bytes;
  CombinePrecision precision;
  LaneRoom room;           // decides the passes of exact sums too
  const void* rows;        // [C, H] type, device, written by XLA
  const float* weights;    // [C] f32, device, written by XLA, multiplied before the sum; or null
  const float* d_weights;  // [C] f32, device, written by XLA, returned to their slots; or null
  Plan plan;
  void* tokens;           // [T, H] type or f32, device; written whole, zeros without rows
  float* d_topk_weights;  // [T, K] f32, device; written whole; null with d_weights
  CombineGrid grid;
  bool wide_tokens = false;  // tokens are f32, of 16-bit rows; with exact sums alone
};

// Sums each staged row's rows in slot order, stores the sum straight to its source's lane, and
// there sums over ranks in order while rows arrive. Exact sums take two epochs, half of the tokens
// each, where a lane does not hold all of them in f32.
cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_COMBINE_KERNELS_H_
