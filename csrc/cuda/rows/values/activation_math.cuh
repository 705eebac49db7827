// Activation functions and their derivatives, named as in `ops/activation/plain.py`.
#ifndef EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_MATH_CUH_
#define EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_MATH_CUH_

#include <cuda_runtime.h>

#include "cuda/rows/values/activation_function.h"

namespace ep_runtime {
namespace cuda {
namespace rows {

// f(x) and f'(x). Both are NaN if x is NaN.
struct Derived {
  float value;
  float slope;
};

__device__ __forceinline__ float Logistic(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));  // 0 for infinity
}

struct Silu {
  __device__ static Derived At(float x) {
    const float s = Logistic(x);
    const float value = x * s;
    return {value, s + value * (1.0f - s)};
  }
};

// 0.5 * (1 + tanh(u)) is Logistic(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x^3).
struct Gelu {
  __device__ static Derived At(float x) {
    constexpr float kLinear = 1.5957691216f;  // 2 * sqrt(2 / pi)
    constexpr float kCubic = 0.044715f;
    const float square = x * x;
    const float s = Logistic(kLinear * x * (1.0f + kCubic * square));
    const float value = x * s;
    return {value, s + value * (1.0f - s) * (kLinear * (1.0f + 3.0f * kCubic * square))};
  }
};

struct Relu {
  __device__ static Derived At(float x) { return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f}; }
};

struct SquaredRelu {
  __device__ static Derived At(float x) {
    const float value = x <= 0.0f ? 0.0f : x;
    return {value * value, x > 0.0f ? 2.0f * value : 0.0f};
  }
};

struct Sigmoid {
  __device__ static Derived At(float x) {
    const float s = Logistic(x);
    return {s, s * (1.0f - s)};
  }
};

struct Tanh {
  __device__ static Derived At(float x) {
    const float value = tanhf(x);
    return {value, 1.0f - value * value};
  }
};

struct Linear {
  __device__ static Derived At(float x) { return {x, 1.0f}; }
};

// Calls `visit(Function{})`, so that one branch serves many values.
template <typename Visit>
__device__ __forceinline__ void WithFunction(ActivationFunction function, Visit&& visit) {
  switch (function) {
    case ActivationFunction::kSilu:
      return visit(Silu{});
    case ActivationFunction::kGelu:
      return visit(Gelu{});
    case ActivationFunction::kRelu:
      return visit(Relu{});
    case ActivationFunction::kSquaredRelu:
      return visit(SquaredRelu{});
    case ActivationFunction::kSigmoid:
      return visit(Sigmoid{});
    case ActivationFunction::kTanh:
      return visit(Tanh{});
    case ActivationFunction::kLinear:
      return visit(Linear{});
  }
}

}  // namespace rows
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_MATH_CUH_
