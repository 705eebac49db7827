// Computes the activation between the experts' two products, or its gradient, as 8-bit floats:
// results are rounded to the rows' type and then quantized, without a pass through memory in
// between.
//
// The results are bit for bit the same as with `activation.h` followed by `quantize.h`.
#ifndef EP_RUNTIME_CUDA_ROWS_ACTIVATION_QUANTIZE_H_
#define EP_RUNTIME_CUDA_ROWS_ACTIVATION_QUANTIZE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/rows/activation.h"
#include "cuda/rows/quantize.h"

namespace ep_runtime {
namespace cuda {

// Letters: S slabs of C rows, L groups of a slab, M values of an activated row, W of a quantized
// row: M, or 2 * M for gradients of gated rows.
struct QuantizedActivationParams {
  ActivationFunction function;
  RowType type;  // kBF16 or kF16
  bool gated;
  rows::RowGroups groups;
  int32_t width;         // M, a multiple of kQuantizedMultiple
  const void* hidden;    // [S * C, M], gated [S * C, 2 * M] (gate, then up), device
  const float* weights;  // [S * C], device, factors of the values; null: none
  const void* grad;      // [S * C, M], device: quantizes gradients of hidden; null: values

  // If not null, the launch computes only `amax`: the largest finite magnitudes of the values to
  // quantize.
  float* amax;          // [num_experts], device
  int32_t num_experts;  // group l of slab s is of expert (s * L + l) % num_experts

  Fp8Format format;
  const float* group_scale;  // [S * L], device; null: each tile has its own scale
  bool power_of_two;         // true: scales of tiles are rounded to powers of two
  uint8_t* data;             // [S * C, W], device
  // [S * C, ceil(M / kTile) * (W / M)], device. Tiles do not extend from the gate's M values into
  // the up's. Null with group_scale.
  float* tile_scale;
  float* d_weights;  // [S * C], for gradients with weights: zeros for slack rows; else null
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};

// Slack rows are not read, and slack rows of `data` and `tile_scale` do not change. Makes one
// launch, two for an amax. Returns cudaErrorInvalidValue if a limit above does not hold.
cudaError_t LaunchQuantizedActivation(cudaStream_t stream, const QuantizedActivationParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ACTIVATION_QUANTIZE_H_
