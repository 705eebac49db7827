// Transposed copies of 8-bit and f32 values: the dim that products contract is along memory.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_
#define EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// [planes, lines, width] -> [planes, width, lines]. Lines and width are multiples of 16; arrays are
// on the device, 16-byte aligned.
struct TransposedPlanes {
  const uint8_t* from;
  uint8_t* to;
  int32_t planes;
  int32_t lines;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 if the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedPlanes& planes);

// Rows [slabs * C, width] -> [width, slabs * PaddedSlabRows(C, L)]; width is a multiple of 16. A
// group begins at FindPaddedRows, and zeros fill up to the next group. Rows behind a slab's last
// group are neither read nor written.
struct TransposedRows {
  Groups groups;
  const uint8_t* from;
  uint8_t* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 if the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedRows& rows);

// TransposedRows of f32 values, in multiples of 4. Bits do not change, because products round them.
struct TransposedFloatRows {
  Groups groups;
  const float* from;
  float* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 if the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatRows& rows);

// [planes, lines, width] f32 values -> the first lines of [planes, to_lines, lines]. Both dims are
// multiples of 4.
struct TransposedFloatPlanes {
  const float* from;
  float* to;
  int32_t planes;
  int32_t lines;
  int32_t width;
  int32_t to_lines;
  const int32_t* wanted = nullptr;  // [1], device: 0 if the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatPlanes& planes);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_
