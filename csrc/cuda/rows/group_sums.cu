#include "cuda/row_math.cuh"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/row_groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;  // rows of a warp on their way at once

struct GroupRows {
  int64_t first;  // of all slabs
  int32_t count;
};

// Called by whole warps.
__device__ inline GroupRows FindGroup(const RowGroups& groups, int group) {
  const int slab = group / groups.groups_per_slab;
  int32_t before = 0;
  for (int g = slab * groups.groups_per_slab + threadIdx.x % 32; g < group; g += 32) {
    before += GroupSize(groups, g, groups.slab_rows);
  }
  before = min(__reduce_add_sync(kAllLanes, before), groups.slab_rows);
  return {static_cast<int64_t>(slab) * groups.slab_rows + before,
          GroupSize(groups, group, groups.slab_rows - before)};
}

// Adds a warp's rows of a group, every kWarps-th one, to the lane's columns from vector `v` on.
template <RowType kType>
__device__ __forceinline__ void AddRows(const GroupSumsParams& p, const GroupRows& rows, int64_t v,
                                        float* total) {
  using E = Element<kType>;
  const int64_t vectors = p.width / E::kPerVector;
  if (v >= vectors) return;
  const auto* from = static_cast<const uint4*>(p.values) + rows.first * vectors + v;
  for (int64_t row = threadIdx.x / 32; row < rows.count; row += kUnroll * kWarps) {
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * kWarps < rows.count) part[u] = LoadStream(from + (row + u * kWarps) * vectors);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * kWarps >= rows.count) break;
      float x[E::kPerVector];
      E::Unpack(part[u], x);
#pragma unroll
      for (int i = 0; i < E::kPerVector; ++i) total[i] += x[i];
    }
  }
}

// blockIdx: 32 vectors side by side, expert. Warps share the rows and add up in their order.
template <RowType kType>
__global__ void __launch_bounds__(kThreads)
    GroupSumsKernel(const __grid_constant__ GroupSumsParams p) {
  using E = Element<kType>;
  constexpr int kColumns = 32 * E::kPerVector;
  __shared__ float parts[kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_groups = p.groups.num_slabs * p.groups.groups_per_slab;
  float total[E::kPerVector];
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) total[i] = 0.0f;
  for (int group = blockIdx.y; group < num_groups; group += p.num_experts) {
    AddRows<kType>(p, FindGroup(p.groups, group), static_cast<int64_t>(blockIdx.x) * 32 + lane,
                   total);
  }
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) parts[warp][lane * E::kPerVector + i] = total[i];
  __syncthreads();
  for (int column = threadIdx.x; column < kColumns; column += kThreads) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kColumns + column;
    if (at >= p.width) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][column];
    p.sums[static_cast<int64_t>(blockIdx.y) * p.width + at] = sum;
  }
}

}  // namespace
}  // namespace rows

cudaError_t LaunchGroupSums(cudaStream_t stream, const GroupSumsParams& p) {
  const int element = p.type == RowType::kF32 ? 4 : 2;
  if (!rows::Fits(p.groups) || p.groups.sizes == nullptr || !rows::Aligned(p.values) ||
      p.width <= 0 || p.width * static_cast<int64_t>(element) % rows::kVectorBytes != 0 ||
      p.num_experts < 1 || p.num_experts > rows::kMaxSlabs) {
    return cudaErrorInvalidValue;
  }
  const int columns = 32 * rows::kVectorBytes / element;
  const dim3 grid((p.width + columns - 1) / columns, p.num_experts);
  switch (p.type) {
    case RowType::kF32:
      rows::GroupSumsKernel<RowType::kF32><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    case RowType::kBF16:
      rows::GroupSumsKernel<RowType::kBF16><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    case RowType::kF16:
      rows::GroupSumsKernel<RowType::kF16><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
