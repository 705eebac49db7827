// Partial sums that travel as 8-bit floats, and their conversion, one vector per lane at a time.
//
// Each piece of a row has first its e4m3 data, then an f32 scale for each kFp8Block values, then
// padding to a multiple of 16 bytes. So one copy loads a piece with its scales. Values are rounded
// as in rows/quantize.h.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_PARTS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_PARTS_CUH_

#include "core/groups/combine_precision.h"
#include "cuda/fp8_values.cuh"
#include "cuda/movement/call/row_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

using E4M3 = Fp8<Fp8Format::kE4M3>;

// Returns the size in bytes of a row's first `values` values, in pieces of piece_values.
__device__ __forceinline__ int32_t Fp8Bytes(int32_t values, int32_t piece_values) {
  const int32_t rest = values % piece_values;
  const int32_t scales = (rest + kFp8Block - 1) / kFp8Block * 4;
  return values / piece_values * (piece_values + piece_values / kFp8Block * 4) +
         (rest + scales + 15) / 16 * 16;
}

// Converts four finite values to one word, the first value in the lowest byte.
__device__ __forceinline__ uint32_t ToFp8(const float* x, float inverse_scale) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = MultiplyFlushed(x[i], inverse_scale);
  return E4M3::Pair(y[0], y[1]) | E4M3::Pair(y[2], y[3]) << 16;
}

__device__ __forceinline__ void FromFp8(uint32_t word, float scale, float* x) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 pair = E4M3::Widen(word >> (16 * half) & 0xFFFFu);
    x[2 * half] = MultiplyFlushed(pair.x, scale);
    x[2 * half + 1] = MultiplyFlushed(pair.y, scale);
  }
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_PARTS_CUH_
