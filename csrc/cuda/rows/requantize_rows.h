// Quantizes 8-bit rows again for weight gradients: transposed, with scales that each cover 128 rows
// of a group, because sums over rows cannot use scales along a row.
//
// The results are bit for bit the same as in `ops/quantize/formats/blocks.py`: data times scale in
// f32, quantized as in `quantize.h`.
#ifndef EP_RUNTIME_CUDA_ROWS_REQUANTIZE_ROWS_H_
#define EP_RUNTIME_CUDA_ROWS_REQUANTIZE_ROWS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"
#include "cuda/rows/quantize.h"

namespace ep_runtime {
namespace cuda {

// Letters: S slabs of C rows, W values of a row; P is PaddedSlabRows(C, groups of a slab).
struct RequantizeRowsParams {
  Fp8Format format;
  gemm::Groups groups;
  int32_t slabs;
  int32_t width;        // W, a multiple of 16
  const uint8_t* data;  // [S * C, W], device, 16-byte aligned
  const float* scale;   // [S * C, ceil(W / kTile)], device
  bool power_of_two;
  // A group begins where FindPaddedRows says, and zeros fill the gap to the next group. Columns
  // past a slab's last group are not written.
  uint8_t* out;                     // [W, S * P], device, 16-byte aligned
  float* out_scale;                 // [S * P / kTile, ceil(W / kTile)], device
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};

// Makes one launch. Returns cudaErrorInvalidValue if a limit above does not hold.
cudaError_t LaunchRequantizeRows(cudaStream_t stream, const RequantizeRowsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_REQUANTIZE_ROWS_H_
