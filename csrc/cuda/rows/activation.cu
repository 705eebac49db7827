// Kernels of activations of rows, and of their gradients.
#include "cuda/movement/call/row_math.cuh"
#include "cuda/rows/activation.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/activation_values.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 32;
constexpr int kUnroll = 2;  // vectors of each operand that a lane loads at once

struct ActivationArguments {
  ActivationFunction function;
  RowGroups groups;
  int32_t vectors;  // vectors of M
  int32_t lanes;    // lanes that share a row: a power of two up to 32
  const uint4* hidden;
  const float* weights;
  const uint4* grad;
  uint4* out;
  float* d_weights;
  const int32_t* wanted;
};

// Indices at which a row's vectors begin.
template <bool kGated>
struct RowAt {
  __device__ RowAt(const ActivationArguments& a, int64_t row)
      : hidden(row * a.vectors * (kGated ? 2 : 1)), inner(row * a.vectors) {}
  int64_t hidden;  // in `hidden`; the up half begins a.vectors later
  int64_t inner;   // in arrays of M values a row
};

template <RowType kType, bool kGated>
__device__ __forceinline__ void ForwardRow(const ActivationArguments& a, int64_t row, int lane) {
  const RowAt<kGated> at(a, row);
  const float weight = a.weights == nullptr ? 1.0f : __ldg(a.weights + row);
  for (int base = lane; base < a.vectors; base += kUnroll * a.lanes) {
    uint4 gate[kUnroll], up[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * a.lanes;
      if (v >= a.vectors) break;
      gate[u] = LoadStream(a.hidden + at.hidden + v);
      if (kGated) up[u] = LoadStream(a.hidden + at.hidden + a.vectors + v);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * a.lanes;
      if (v >= a.vectors) break;
      StoreVector(a.out + at.inner + v, Values<kType, kGated>(a.function, gate[u], up[u], weight));
    }
  }
}

// Returns the lane's share of the gradient of the row's weight.
template <RowType kType, bool kGated>
__device__ __forceinline__ float BackwardRow(const ActivationArguments& a, int64_t row, int lane) {
  const RowAt<kGated> at(a, row);
  const float weight = a.weights == nullptr ? 1.0f : __ldg(a.weights + row);
  float sum = 0.0f;
  for (int base = lane; base < a.vectors; base += kUnroll * a.lanes) {
    uint4 gate[kUnroll], up[kUnroll], grad[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * a.lanes;
      if (v >= a.vectors) break;
      // Do not use the read-only cache, because `out` may be the same memory.
      gate[u] = LoadShared(a.hidden + at.hidden + v);
      if (kGated) up[u] = LoadShared(a.hidden + at.hidden + a.vectors + v);
      grad[u] = LoadStream(a.grad + at.inner + v);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * a.lanes;
      if (v >= a.vectors) break;
      sum += Gradients<kType, kGated>(a.function, grad[u], weight, &gate[u], &up[u]);
      StoreVector(a.out + at.hidden + v, gate[u]);
      if (kGated) StoreVector(a.out + at.hidden + a.vectors + v, up[u]);
    }
  }
  return sum;
}

// Stores the gradient of the weight of a row, of which each lane has a partial sum. Call this with
// whole warps.
__device__ __forceinline__ void StoreSum(const ActivationArguments& a, int64_t row, bool there,
                                         int lane, float sum) {
  for (int step = a.lanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  if (there && lane == 0) a.d_weights[row] = sum;
}

// blockIdx.y is the slab. Groups of `lanes` lanes take the rows in turn. Sums have a fixed order.
template <RowType kType, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    ActivationKernel(const __grid_constant__ ActivationArguments a) {
  if (LeftOut(a.wanted)) return;
  const int slab = blockIdx.y;
  const int32_t used = SlabRows(a.groups, slab);
  const int64_t first = static_cast<int64_t>(slab) * a.groups.slab_rows;
  const int lane = threadIdx.x % a.lanes;
  const int rows_per_block = kThreads / a.lanes;
  // All lanes of a warp run every iteration, because StoreSum shuffles across the whole warp.
  const int in_warp = threadIdx.x % 32 / a.lanes;
  const int64_t start =
      static_cast<int64_t>(blockIdx.x) * rows_per_block + threadIdx.x / a.lanes - in_warp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * rows_per_block;
  for (int64_t base = start; base < used; base += stride) {
    const int64_t row = first + base + in_warp;
    const bool there = base + in_warp < used;
    if constexpr (kBackward) {
      const float sum = there ? BackwardRow<kType, kGated>(a, row, lane) : 0.0f;
      if (a.d_weights != nullptr) StoreSum(a, row, there, lane, sum);
    } else {
      if (there) ForwardRow<kType, kGated>(a, row, lane);
    }
  }
  if constexpr (kBackward) {
    if (a.d_weights == nullptr) return;
    for (int64_t row = used + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         row < a.groups.slab_rows; row += static_cast<int64_t>(gridDim.x) * kThreads) {
      a.d_weights[first + row] = 0.0f;
    }
  }
}

using KernelFn = void (*)(const ActivationArguments);

template <RowType kType>
KernelFn FindKernel(bool gated, bool backward) {
  if (gated) {
    return backward ? ActivationKernel<kType, true, true> : ActivationKernel<kType, true, false>;
  }
  return backward ? ActivationKernel<kType, false, true> : ActivationKernel<kType, false, false>;
}

KernelFn FindKernel(const ActivationParams& p) {
  const bool backward = p.grad != nullptr;
  switch (p.type) {
    case RowType::kF32:
      return FindKernel<RowType::kF32>(p.gated, backward);
    case RowType::kBF16:
      return FindKernel<RowType::kBF16>(p.gated, backward);
    case RowType::kF16:
      return FindKernel<RowType::kF16>(p.gated, backward);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace rows

cudaError_t LaunchActivation(cudaStream_t stream, const ActivationParams& p) {
  const rows::KernelFn kernel = rows::FindKernel(p);
  const int element = p.type == RowType::kF32 ? 4 : 2;
  const bool aligned = rows::Aligned(p.hidden) && rows::Aligned(p.grad) && rows::Aligned(p.out);
  const auto function = static_cast<int32_t>(p.function);
  if (kernel == nullptr || !rows::Fits(p.groups) || !aligned || p.width <= 0 ||
      p.width * static_cast<int64_t>(element) % rows::kVectorBytes != 0 || function < 0 ||
      function >= kActivationFunctions) {
    return cudaErrorInvalidValue;
  }
  rows::ActivationArguments a{p.function,
                              p.groups,
                              p.width / (rows::kVectorBytes / element),
                              1,
                              static_cast<const uint4*>(p.hidden),
                              p.weights,
                              static_cast<const uint4*>(p.grad),
                              static_cast<uint4*>(p.out),
                              p.d_weights,
                              p.wanted};
  while (a.lanes < 32 && a.lanes < a.vectors) a.lanes *= 2;
  dim3 grid;
  const cudaError_t error =
      rows::GridOf(p.groups, rows::kThreads / a.lanes, rows::kBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  kernel<<<grid, rows::kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
