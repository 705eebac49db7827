// Computes values and gradients of one vector of a row. All activations share this arithmetic, so
// that they give the same bits.
#ifndef EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_VALUES_CUH_
#define EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_VALUES_CUH_

#include "cuda/movement/call/row_math.cuh"
#include "cuda/rows/values/activation_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {

template <RowType kType, bool kGated, class Function>
__device__ __forceinline__ uint4 ValuesOf(const uint4& gate, const uint4& up, float weight) {
  using E = Element<kType>;
  float x[E::kPerVector], other[E::kPerVector];
  E::Unpack(gate, x);
  if (kGated) E::Unpack(up, other);
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) {
    const float value = Function::At(x[i]).value;
    x[i] = (kGated ? value * other[i] : value) * weight;
  }
  return E::Pack(x);
}

template <RowType kType, bool kGated>
__device__ __forceinline__ uint4 Values(ActivationFunction function, const uint4& gate,
                                        const uint4& up, float weight) {
  uint4 values;
  WithFunction(function,
               [&](auto f) { values = ValuesOf<kType, kGated, decltype(f)>(gate, up, weight); });
  return values;
}

// Replaces `gate` and `up` by their gradients. Returns the sum of grad times value.
template <RowType kType, bool kGated>
__device__ __forceinline__ float Gradients(ActivationFunction function, const uint4& grad,
                                           float weight, uint4* gate, uint4* up) {
  using E = Element<kType>;
  float g[E::kPerVector], x[E::kPerVector], other[E::kPerVector];
  E::Unpack(grad, g);
  E::Unpack(*gate, x);
  if (kGated) E::Unpack(*up, other);
  float sum = 0.0f;
  WithFunction(function, [&](auto f) {
#pragma unroll
    for (int i = 0; i < E::kPerVector; ++i) {
      const Derived derived = decltype(f)::At(x[i]);
      const float scaled = g[i] * weight;
      sum += g[i] * (kGated ? derived.value * other[i] : derived.value);
      x[i] = (kGated ? scaled * other[i] : scaled) * derived.slope;
      if (kGated) other[i] = scaled * derived.value;
    }
  });
  *gate = E::Pack(x);
  if (kGated) *up = E::Pack(other);
  return sum;
}

}  // namespace rows
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_VALUES_CUH_
