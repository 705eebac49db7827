// Converts f32 values to 8-bit floats, with the same scales and rounding as the CPU code.
#ifndef EP_RUNTIME_CUDA_FP8_VALUES_CUH_
#define EP_RUNTIME_CUDA_FP8_VALUES_CUH_

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cuda/fp8_format.h"

namespace ep_runtime {
namespace cuda {

constexpr float kSmallest = 1.17549435e-38f;  // 2^-126: smaller values are 0 on CPU

template <Fp8Format kFormat>
struct Fp8 {
  static constexpr bool kWide = kFormat == Fp8Format::kE5M2;
  static constexpr float kLargest = kWide ? 57344.0f : 448.0f;
  static constexpr int kExponent = kWide ? 15 : 8;  // kLargest is 1.75 * 2^kExponent
  static constexpr uint32_t kNan = kWide ? 0x7Eu : 0x7Fu;
  static constexpr uint32_t kInfinity = kWide ? 0x7Cu : 0x7Fu;  // e4m3 has no infinity: NaN instead

  __device__ static float ScaleOf(float amax, bool power_of_two) {
    if (amax < kSmallest) return 1.0f;
    if (!power_of_two) return fmaxf(__fdiv_rn(amax, kLargest), kSmallest);
    const int raw = __float_as_int(amax);
    const int biased = (raw >> 23) - kExponent + ((raw & 0x7FFFFF) > 0x600000);
    return __int_as_float(min(max(biased, 1), 254) << 23);
  }
  // Rounds two values to two bytes, the first value in the lower byte. Values out of range
  // saturate.
  __device__ static uint32_t Pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE,
                                    kWide ? __NV_E5M2 : __NV_E4M3);
  }
  // Converts the lower two bytes to floats, as the inverse of Pair.
  __device__ static float2 Widen(uint32_t pair) {
    const __half2 exact(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair),
                                                   kWide ? __NV_E5M2 : __NV_E4M3));
    return __half22float2(exact);
  }
  __device__ static uint32_t NotFinite(float x) {
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
    return sign | (isnan(x) ? kNan : kInfinity);
  }
};

// Multiplies. Operands and results below 2^-126 become zeros with their sign, as on CPU.
__device__ __forceinline__ float MultiplyFlushed(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_FP8_VALUES_CUH_
