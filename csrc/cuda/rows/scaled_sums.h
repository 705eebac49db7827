// Sums 8-bit rows that have a scale for every tile.
#ifndef EP_RUNTIME_CUDA_ROWS_SCALED_SUMS_H_
#define EP_RUNTIME_CUDA_ROWS_SCALED_SUMS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

struct SumScaledRowsParams {
  RowType type;             // type number of rows of `out`: kF32, kBF16 or kF16; summed in f32,
                            // rounded once
  int32_t tokens;           // number of rows of `out`
  int32_t slots;            // S
  int32_t num_rows;         // number of rows of `data`
  int32_t width;            // W, a multiple of kQuantizedMultiple
  const int32_t* slot_row;  // [tokens, S], device: negative: the slot has no row
  const uint8_t* data;      // [num_rows, W] e4m3, device
  const float* scale;       // [num_rows, ceil(W / kTile)], device
  void* out;                // [tokens, W], device: sums in slot order
};
// Makes one launch.
cudaError_t LaunchSumScaledRows(cudaStream_t stream, const SumScaledRowsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_SCALED_SUMS_H_
