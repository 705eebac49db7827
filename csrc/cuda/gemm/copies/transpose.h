// Makes transposed copies of 8-bit and f32 values, in which the contracted dim is contiguous.
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
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedPlanes& planes);

// Rows [slabs * C, width] -> [width, slabs * PaddedSlabRows(C, L)]; width is a multiple of 16. A
// group begins where FindPaddedRows says, and zeros fill the gap to the next group. Rows past a
// slab's last group are neither read nor written.
struct TransposedRows {
  Groups groups;
  const uint8_t* from;
  uint8_t* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedRows& rows);

// Like TransposedRows, for f32 values; width is a multiple of 4. Copies keep all bits, because the
// products round to tf32.
struct TransposedFloatRows {
  Groups groups;
  const float* from;
  float* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatRows& rows);

// [planes, lines, width] f32 values -> the first `width` lines of each plane of [planes, to_lines,
// lines]. Lines and width are multiples of 4.
struct TransposedFloatPlanes {
  const float* from;
  float* to;
  int32_t planes;
  int32_t lines;
  int32_t width;
  int32_t to_lines;
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatPlanes& planes);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_
