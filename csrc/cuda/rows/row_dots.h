// Products of rows with a vector of their expert: the part of the weights' gradients that comes
// from a weighted bias.
#ifndef EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_
#define EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/rows/row_groups.h"

namespace ep_runtime {
namespace cuda {

struct RowDotsParams {
  RowType type;  // of rows: kF32, kBF16 or kF16
  rows::RowGroups groups;
  int32_t width;                    // W; 16 bytes divide a row of it
  const void* values;               // [S * C, W] type, device
  const void* vectors;              // [S * L, W], device
  RowType vector_type;              // the rows' type, or kF32
  float* dots;                      // [S * C], device: added to; slack rows do not change
  const int32_t* wanted = nullptr;  // [1], device: 0 if the launch has nothing to do; or null
};

// Makes one launch.
cudaError_t LaunchRowDots(cudaStream_t stream, const RowDotsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_
