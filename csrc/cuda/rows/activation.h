// Computes the activation between the experts' two products, or its gradient, in one pass over the
// rows of groups.
#ifndef EP_RUNTIME_CUDA_ROWS_ACTIVATION_H_
#define EP_RUNTIME_CUDA_ROWS_ACTIVATION_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/rows/row_groups.h"
#include "cuda/rows/values/activation_function.h"

namespace ep_runtime {
namespace cuda {

struct ActivationParams {
  ActivationFunction function;
  RowType type;  // kF32, kBF16 or kF16; arithmetic is in f32
  bool gated;    // true: f(gate) * up; false: f(h)
  rows::RowGroups groups;
  int32_t width;         // M; a row has a multiple of 16 bytes
  const void* hidden;    // [S * C, M], gated [S * C, 2 * M] (gate, then up), device
  const float* weights;  // [S * C], device, factors of the values; null: none
  const void* grad;      // [S * C, M], device: backward; null: forward
  void* out;             // forward [S * C, M]; backward like hidden, maybe the same memory
  float* d_weights;      // [S * C], for backward with weights: zeros for slack rows; else null
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};

// Makes one launch. Slack rows are not read, and slack rows of `out` do not change. Returns
// cudaErrorInvalidValue if a limit above does not hold.
cudaError_t LaunchActivation(cudaStream_t stream, const ActivationParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ACTIVATION_H_
