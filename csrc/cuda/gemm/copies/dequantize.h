// Multiplies 8-bit values by scales that the tensor cores cannot apply, into bf16.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_DEQUANTIZE_H_
#define EP_RUNTIME_CUDA_GEMM_COPIES_DEQUANTIZE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"
#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// Values are [planes, lines, width]; each tile of line_values x column_values shares a scale. e8m0
// scales are powers of two, so the result is exact, except values too small for bf16. With other
// scales the result is rounded once.
struct DequantizeParams {
  Groups groups;     // sizes null: all lines are copied. Otherwise planes are slabs, and lines past
                     // the last group are neither read nor written
  const void* data;  // [planes, lines, width] type, device, 16-byte aligned
  FloatType type;    // kE4M3 or kE5M2
  const void* scale;  // [planes, ceil(lines / line_values), ceil(width / column_values)], device
  bool e8m0;          // true: scales are e8m0; false: f32
  int32_t planes;
  int32_t lines;
  int32_t width;  // a multiple of 16
  int32_t line_values;
  int32_t column_values;  // 1 (with e8m0) or a multiple of 16
  void* out;              // [planes, lines, width] bf16, device, 16-byte aligned
};
cudaError_t LaunchDequantize(cudaStream_t stream, const DequantizeParams& params);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_DEQUANTIZE_H_
