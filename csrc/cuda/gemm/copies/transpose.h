// Copies of 8-bit and f32 values with the dim along memory that products contract.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_
#define EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// [planes, lines, width] -> [planes, width, lines], both multiples of 16; arrays on the device,
// 16-byte aligned.
struct TransposedPlanes {
  const uint8_t* from;
  uint8_t* to;
  int32_t planes;
  int32_t lines;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 where the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedPlanes& planes);

// Rows [slabs * C, width] -> [width, slabs * PaddedSlabRows(C, L)]; width a multiple of 16. A group
// begins where FindPaddedRows says, zeros follow up to the next one. What lies behind a slab's last
// group is neither read nor written.
struct TransposedRows {
  Groups groups;
  const uint8_t* from;
  uint8_t* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // [1], device: 0 where the launch has nothing to do; or null
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedRows& rows);

// The same of f32 values, in multiples of 4. Bits stay as they are: products round them.
struct TransposedFloatRows {
  Groups groups;
  const float* from;
  float* to;
  int32_t slabs;
  int32_t width;
  const int32_t* wanted = nullptr;  // as above
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatRows& rows);

// Planes of f32 values, both dims multiples of 4, to the first lines of planes of `to_lines` lines
// each: [planes, lines, width] -> [planes, to_lines, lines].
struct TransposedFloatPlanes {
  const float* from;
  float* to;
  int32_t planes;
  int32_t lines;
  int32_t width;
  int32_t to_lines;
  const int32_t* wanted = nullptr;  // as above
};
cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatPlanes& planes);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_H_
