// Arithmetic on 16-byte pieces of rows. Every product is rounded before it is added, as on CPU.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_ROW_MATH_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_ROW_MATH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

template <RowType kType>
struct Element;

template <>
struct Element<RowType::kF32> {
  using Storage = float;
  static constexpr int kPerVector = 4;
  __device__ static void Unpack(const uint4& v, float* x) {
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
  }
  __device__ static uint4 Pack(const float* x) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  }
  __device__ static float Widen(Storage x) { return x; }
};

template <>
struct Element<RowType::kBF16> {
  using Storage = __nv_bfloat16;
  static constexpr int kPerVector = 8;
  __device__ static void Unpack(const uint4& v, float* x) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  __device__ static uint4 Pack(const float* x) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static float Widen(Storage x) { return __bfloat162float(x); }
};

template <>
struct Element<RowType::kF16> {
  using Storage = __half;
  static constexpr int kPerVector = 8;
  __device__ static void Unpack(const uint4& v, float* x) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  __device__ static uint4 Pack(const float* x) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static float Widen(Storage x) { return __half2float(x); }
};

// Loads rows that peers write during the kernel, so never uses the read-only cache.
__device__ __forceinline__ uint4 LoadShared(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// Loads rows that nobody writes during the kernel.
__device__ __forceinline__ uint4 LoadStream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ void StoreVector(void* p, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

inline uint32_t NanPattern(RowType type) {
  switch (type) {
    case RowType::kF32:
      return 0x7FC00000u;
    case RowType::kBF16:
      return 0x7FC07FC0u;
    case RowType::kF16:
      return 0x7E007E00u;
    default:
      return 0;
  }
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_ROW_MATH_CUH_
