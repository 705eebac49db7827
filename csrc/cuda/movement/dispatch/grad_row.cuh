// Computes one row of combine's backward: weight * grad, and the dot product grad . expert_out,
// summed as a halving tree.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_GRAD_ROW_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_GRAD_ROW_CUH_

#include "cuda/movement/call/row_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

constexpr int kParts = 8;  // parts of a row; the tree's first three levels stay in registers

// Whether a row splits into parts of whole vectors.
template <RowType kType>
__host__ __device__ inline bool InParts(int width) {
  return width % (kParts * Element<kType>::kPerVector) == 0;
}

// Returns the number of floats that the tree of one row needs in shared memory.
template <RowType kType>
__host__ __device__ inline int TreeFloats(int width) {
  return InParts<kType>(width) ? width / kParts : (width + 1) / 2;
}

template <RowType kType>
struct GradRow {
  using E = Element<kType>;
  const uint4* grad;
  const uint4* expert_out;  // null: no dot product
  uint4* out;
  int width;
  bool scale;
  float weight;

  __device__ __forceinline__ uint4 Scaled(const uint4& v) const {
    if (!scale) return v;
    float x[E::kPerVector];
    E::Unpack(v, x);
#pragma unroll
    for (int j = 0; j < E::kPerVector; ++j) x[j] = __fmul_rn(weight, x[j]);
    return E::Pack(x);
  }
  // product[j] = grad[j] * expert_out[j], for one vector.
  __device__ __forceinline__ static void Multiply(const uint4& g, const uint4& x, float* product) {
    float left[E::kPerVector], right[E::kPerVector];
    E::Unpack(g, left);
    E::Unpack(x, right);
#pragma unroll
    for (int j = 0; j < E::kPerVector; ++j) product[j] = __fmul_rn(left[j], right[j]);
  }

  __device__ __forceinline__ void Scale() const {
    constexpr int kBatch = 4;
    const int vectors = width / E::kPerVector;
    for (int start = threadIdx.x % 32; start < vectors; start += 32 * kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (start + u * 32 < vectors) v[u] = LoadShared(grad + start + u * 32);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (start + u * 32 < vectors) StoreVector(out + start + u * 32, Scaled(v[u]));
      }
    }
  }

  // Computes sum[i] over three levels of the tree, and also writes the scaled row.
  __device__ __forceinline__ void ScaleAndSumParts(float* sum) const {
    constexpr int kPer = E::kPerVector;
    const int part = width / kPer / kParts;
    for (int i = threadIdx.x % 32; i < part; i += 32) {
      uint4 g[kParts], x[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        g[p] = LoadShared(grad + p * part + i);
        x[p] = LoadStream(expert_out + p * part + i);
      }
      float total[kPer];
#pragma unroll
      for (int p = 0; p < kParts / 4; ++p) {
        // Parts p, p + 4, p + 2 and p + 6 are elements of one quarter of the tree.
        float a[kPer], b[kPer], c[kPer], d[kPer];
        Multiply(g[p], x[p], a);
        Multiply(g[p + 4], x[p + 4], b);
        Multiply(g[p + 2], x[p + 2], c);
        Multiply(g[p + 6], x[p + 6], d);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          const float four = __fadd_rn(__fadd_rn(a[j], b[j]), __fadd_rn(c[j], d[j]));
          total[j] = p == 0 ? four : __fadd_rn(total[j], four);
        }
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) StoreVector(out + p * part + i, Scaled(g[p]));
#pragma unroll
      for (int j = 0; j < kPer; j += 4) {
        reinterpret_cast<float4*>(sum)[(i * kPer + j) / 4] =
            make_float4(total[j], total[j + 1], total[j + 2], total[j + 3]);
      }
    }
  }

  // Computes sum[i] over one level, for widths that do not split into parts.
  __device__ __forceinline__ void SumHalves(float* sum) const {
    using Storage = typename E::Storage;
    const auto* g = reinterpret_cast<const volatile Storage*>(grad);
    const auto* x = reinterpret_cast<const Storage*>(expert_out);
    const auto product = [&](int i) {
      const Storage left = const_cast<const Storage&>(g[i]);
      return __fmul_rn(E::Widen(left), E::Widen(x[i]));
    };
    const int half = (width + 1) / 2;
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      sum[i] = i < width - half ? __fadd_rn(product(i), product(half + i)) : product(i);
    }
  }

  // Writes the row, and returns the dot product if there is expert_out. `tree` has room for
  // TreeFloats floats of this warp.
  __device__ __noinline__ float Write(float* tree) const {
    if (expert_out == nullptr) {
      Scale();
      return 0.0f;
    }
    const bool parts = InParts<kType>(width);
    if (parts) {
      ScaleAndSumParts(tree);
    } else {
      Scale();
      SumHalves(tree);
    }
    __syncwarp();
    for (int left = TreeFloats<kType>(width); left > 1;) {
      const int half = (left + 1) / 2;
      for (int i = threadIdx.x % 32; i < left - half; i += 32) {
        tree[i] = __fadd_rn(tree[i], tree[half + i]);
      }
      __syncwarp();
      left = half;
    }
    const float dot = tree[0];
    __syncwarp();
    return dot;
  }
};

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_GRAD_ROW_CUH_
