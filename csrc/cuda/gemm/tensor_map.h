// Descriptions of arrays for tensor copies (TMA).
#ifndef EP_RUNTIME_CUDA_GEMM_TENSOR_MAP_H_
#define EP_RUNTIME_CUDA_GEMM_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// A dense array [planes, lines, width].
struct Array {
  const void* data;  // device, 16-byte aligned
  FloatType type;
  int64_t width;
  int64_t lines;
  int64_t planes;
};

// Makes a map of boxes of `box_lines` lines of 128 bytes, swizzled over 128 bytes in shared memory.
// Reads outside the array give zeros.
cudaError_t DescribeArray(const Array& array, int box_lines, CUtensorMap* map);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TENSOR_MAP_H_
