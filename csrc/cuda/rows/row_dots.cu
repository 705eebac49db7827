// Computes dot products of rows with a vector of their expert.
#include "cuda/movement/call/row_math.cuh"
#include "cuda/rows/row_dots.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;

// Reads values of `vectors` as floats. `index` counts 16-byte vectors of type kType.
template <RowType kType, RowType kVector>
__device__ __forceinline__ void ReadVector(const void* vectors, int64_t index, float* x) {
  const auto* from = static_cast<const uint4*>(vectors);
  if constexpr (kType == kVector) {
    Element<kType>::Unpack(__ldg(from + index), x);
  } else {
    Element<RowType::kF32>::Unpack(__ldg(from + 2 * index), x);
    Element<RowType::kF32>::Unpack(__ldg(from + 2 * index + 1), x + 4);
  }
}

// blockIdx.y is the slab. Each warp computes one row at a time.
template <RowType kType, RowType kVector>
__global__ void __launch_bounds__(kThreads) RowDotsKernel(const __grid_constant__ RowDotsParams p) {
  using E = Element<kType>;
  __shared__ int32_t ends[kMaxGroupsPerSlab];
  if (LeftOut(p.wanted)) return;
  const int count = p.groups.groups_per_slab, lane = threadIdx.x % 32;
  GroupEnds(p.groups, blockIdx.y, ends);
  const int64_t vectors = p.width / E::kPerVector;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * p.groups.slab_rows;
  const int used = count == 0 ? 0 : ends[count - 1];
  for (int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < used;
       row += gridDim.x * (kThreads / 32)) {
    const int64_t group = static_cast<int64_t>(blockIdx.y) * count + GroupOf(ends, count, row);
    const auto* from = static_cast<const uint4*>(p.values) + (first + row) * vectors;
    float sum = 0.0f;
    for (int64_t v = lane; v < vectors; v += 32) {
      float x[E::kPerVector], y[E::kPerVector];
      E::Unpack(LoadStream(from + v), x);
      ReadVector<kType, kVector>(p.vectors, group * vectors + v, y);
#pragma unroll
      for (int i = 0; i < E::kPerVector; ++i) sum += x[i] * y[i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane == 0) p.dots[first + row] += sum;
  }
}

using KernelFn = void (*)(const RowDotsParams);

KernelFn FindKernel(const RowDotsParams& p) {
  const bool wide = p.vector_type == RowType::kF32;
  if (!wide && p.vector_type != p.type) return nullptr;
  switch (p.type) {
    case RowType::kF32:
      return RowDotsKernel<RowType::kF32, RowType::kF32>;
    case RowType::kBF16:
      return wide ? RowDotsKernel<RowType::kBF16, RowType::kF32>
                  : RowDotsKernel<RowType::kBF16, RowType::kBF16>;
    case RowType::kF16:
      return wide ? RowDotsKernel<RowType::kF16, RowType::kF32>
                  : RowDotsKernel<RowType::kF16, RowType::kF16>;
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace rows

cudaError_t LaunchRowDots(cudaStream_t stream, const RowDotsParams& p) {
  const rows::KernelFn kernel = rows::FindKernel(p);
  const int element = p.type == RowType::kF32 ? 4 : 2;
  if (kernel == nullptr || !rows::Fits(p.groups) || p.groups.sizes == nullptr ||
      !rows::Aligned(p.values) || !rows::Aligned(p.vectors) || p.width <= 0 ||
      p.width * static_cast<int64_t>(element) % rows::kVectorBytes != 0) {
    return cudaErrorInvalidValue;
  }
  dim3 grid;
  const cudaError_t error =
      rows::GridOf(p.groups, rows::kThreads / 32, rows::kBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  kernel<<<grid, rows::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
