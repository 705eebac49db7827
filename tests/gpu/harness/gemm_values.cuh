// Values of operands: computed from their index, stored and loaded in any of the types.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_VALUES_CUH_
#define EP_RUNTIME_TESTS_GPU_GEMM_VALUES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "gemm_case.h"

namespace gemm_test {

__device__ inline uint32_t Hash(uint64_t index, uint32_t seed) {
  uint32_t x = static_cast<uint32_t>(index) * 0x9E3779B1u ^
               static_cast<uint32_t>(index >> 32) * 0x85EBCA77u ^ seed * 0xC2B2AE3Du;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

__device__ inline float NormalAt(uint64_t index, uint32_t seed) {
  const float u = (Hash(index, seed) + 1.0f) * 2.3283064e-10f;
  const float v = Hash(index, seed + 77) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

__device__ inline void StoreFloat(void* data, FloatType type, int64_t i, float value) {
  if (type == FloatType::kBF16) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
  if (type == FloatType::kF16) static_cast<__half*>(data)[i] = __float2half(value);
  if (type == FloatType::kF32 || type == FloatType::kTF32) static_cast<float*>(data)[i] = value;
  if (type == FloatType::kE4M3) static_cast<__nv_fp8_e4m3*>(data)[i] = __nv_fp8_e4m3(value);
  if (type == FloatType::kE5M2) static_cast<__nv_fp8_e5m2*>(data)[i] = __nv_fp8_e5m2(value);
}

// Rounds to 10 fraction bits, ties to even. NaN stays.
__device__ inline float RoundToTf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (!isfinite(value)) return value;
  return __uint_as_float((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu);
}

__device__ inline float LoadFloat(const void* data, FloatType type, int64_t i) {
  if (type == FloatType::kBF16) return static_cast<const __nv_bfloat16*>(data)[i];
  if (type == FloatType::kF16) return static_cast<const __half*>(data)[i];
  if (type == FloatType::kE4M3) {
    return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[i]);
  }
  if (type == FloatType::kE5M2) {
    return static_cast<float>(static_cast<const __nv_fp8_e5m2*>(data)[i]);
  }
  const float value = static_cast<const float*>(data)[i];
  return type == FloatType::kTF32 ? RoundToTf32(value) : value;
}

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_VALUES_CUH_
