// Computes dot products of rows with a vector of their expert: a weighted bias's part of the
// gradients of the weights.
#ifndef EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_
#define EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/rows/row_groups.h"

namespace ep_runtime {
namespace cuda {

struct RowDotsParams {
  RowType type;  // type of rows: kF32, kBF16 or kF16
  rows::RowGroups groups;
  int32_t width;                    // W; a row has a multiple of 16 bytes
  const void* values;               // [S * C, W] type, device
  const void* vectors;              // [S * L, W], device
  RowType vector_type;              // the rows' type, or kF32
  float* dots;                      // [S * C], device: results are added; slack rows do not change
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};

// Makes one launch.
cudaError_t LaunchRowDots(cudaStream_t stream, const RowDotsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ROW_DOTS_H_
