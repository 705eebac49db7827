// Multiplies 8-bit values by their scales, into bf16.
#include <cuda_bf16.h>

#include "cuda/fp8_values.cuh"
#include "cuda/gemm/copies/dequantize.h"
#include "cuda/gemm/product/groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 16;            // values that a thread converts at a time
constexpr int kBlocksPerPlane = 1024;  // limit of blocks that share a plane's vectors

// 2^(byte - 127), NaN for 255. 2^-127 is subnormal in f32.
__device__ __forceinline__ float PowerOf(uint32_t byte) {
  if (byte == 0) return __uint_as_float(0x00400000u);
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte << 23);
}

template <Fp8Format kFormat>
__device__ __forceinline__ uint32_t WidenPair(uint32_t pair, float first, float second) {
  const float2 values = Fp8<kFormat>::Widen(pair);
  const __nv_bfloat162 result = __floats2bfloat162_rn(values.x * first, values.y * second);
  return *reinterpret_cast<const uint32_t*>(&result);
}

template <Fp8Format kFormat>
__device__ __forceinline__ void Widen(const uint4& data, const float (&scales)[kVector],
                                      uint4* out) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = words[i / 2] >> (i % 2 * 16) & 0xFFFF;
    pairs[i] = WidenPair<kFormat>(pair, scales[2 * i], scales[2 * i + 1]);
  }
  out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// Loads the scales of the 16 values that start at `column`. `line` is a line of the scales' array.
__device__ __forceinline__ void LoadScales(const DequantizeParams& p, int64_t line, int32_t column,
                                           float (&scales)[kVector]) {
  const int64_t width = (p.width + p.column_values - 1) / p.column_values;
  const int64_t at = line * width + column / p.column_values;
  if (p.column_values > 1) {
    const float one = p.e8m0 ? PowerOf(__ldg(static_cast<const uint8_t*>(p.scale) + at))
                             : __ldg(static_cast<const float*>(p.scale) + at);
#pragma unroll
    for (int i = 0; i < kVector; ++i) scales[i] = one;
    return;
  }
  const uint4 bytes =
      __ldg(reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.scale) + at));
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) scales[i] = PowerOf(words[i / 4] >> (i % 4 * 8) & 0xFF);
}

// blockIdx.y is the plane.
__global__ void __launch_bounds__(kThreads) DequantizeKernel(const DequantizeParams p) {
  const int plane = blockIdx.y;
  int32_t lines = p.lines;
  if (p.groups.sizes != nullptr) {
    lines = 0;
    if (p.groups.groups_per_slab > 0) {
      const Rows last = FindRows(p.groups, (plane + 1) * p.groups.groups_per_slab - 1);
      lines = last.start + last.size - plane * p.groups.slab_rows;
    }
  }
  const uint32_t across = p.width / kVector;
  const uint32_t vectors = lines * across;
  const int64_t first = static_cast<int64_t>(plane) * p.lines * across;
  const int64_t scale_line =
      static_cast<int64_t>(plane) * ((p.lines + p.line_values - 1) / p.line_values);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < vectors; i += gridDim.x * kThreads) {
    const uint4 data = __ldg(static_cast<const uint4*>(p.data) + first + i);
    float scales[kVector];
    LoadScales(p, scale_line + i / across / p.line_values, i % across * kVector, scales);
    uint4* out = static_cast<uint4*>(p.out) + 2 * (first + i);
    if (p.type == FloatType::kE4M3) {
      Widen<Fp8Format::kE4M3>(data, scales, out);
    } else {
      Widen<Fp8Format::kE5M2>(data, scales, out);
    }
  }
}

}  // namespace

cudaError_t LaunchDequantize(cudaStream_t stream, const DequantizeParams& params) {
  const int64_t vectors = static_cast<int64_t>(params.lines) * (params.width / kVector);
  const bool blocks = params.column_values % kVector == 0 && params.column_values > 0;
  if (params.width % kVector != 0 || params.line_values < 1 || BytesOf(params.type) != 1 ||
      !(blocks || (params.column_values == 1 && params.e8m0)) || vectors >= INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (params.planes == 0 || vectors == 0) return cudaSuccess;
  const int64_t wanted = (vectors + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(wanted < kBlocksPerPlane ? wanted : kBlocksPerPlane),
                  params.planes);
  DequantizeKernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
