// Sums the rows of every expert.
#include "cuda/movement/call/row_math.cuh"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 512;
// Neighbouring lanes that share a row. With fewer lanes, more blocks share the rows of one group,
// which helps large groups, but each load reads a shorter piece of a row.
constexpr int kRowLanes = 16;
constexpr int kStrips = kThreads / kRowLanes;  // every kStrips-th row belongs to a strip
constexpr int kUnroll = 4;                     // rows that a strip loads at once

struct GroupRows {
  int64_t first;  // number among the rows of all slabs
  int32_t count;
};

// Returns the rows of a group. Call this with whole warps.
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

// Adds the strip's rows of a group to `total`, for the lane's columns, which are vector `v`.
template <RowType kType>
__device__ __forceinline__ void AddRows(const GroupSumsParams& p, const GroupRows& rows, int64_t v,
                                        float* total) {
  using E = Element<kType>;
  const int64_t vectors = p.width / E::kPerVector;
  if (v >= vectors) return;
  const auto* from = static_cast<const uint4*>(p.values) + rows.first * vectors + v;
  for (int64_t row = threadIdx.x / kRowLanes; row < rows.count; row += kUnroll * kStrips) {
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = row + u * kStrips;
      if (at < rows.count) part[u] = LoadStream(from + at * vectors);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * kStrips >= rows.count) break;
      float x[E::kPerVector];
      E::Unpack(part[u], x);
      const float weight =
          p.weights == nullptr ? 1.0f : __ldg(p.weights + rows.first + row + u * kStrips);
#pragma unroll
      for (int i = 0; i < E::kPerVector; ++i) total[i] += weight * x[i];
    }
  }
}

// blockIdx is (run of kRowLanes vectors, expert). Strips share the rows; their sums are added in
// order.
template <RowType kType>
__global__ void __launch_bounds__(kThreads)
    GroupSumsKernel(const __grid_constant__ GroupSumsParams p) {
  using E = Element<kType>;
  constexpr int kColumns = kRowLanes * E::kPerVector;
  __shared__ float parts[kStrips][kColumns];
  if (LeftOut(p.wanted)) return;
  const int lane = threadIdx.x % kRowLanes, strip = threadIdx.x / kRowLanes;
  const int num_groups = p.groups.num_slabs * p.groups.groups_per_slab;
  float total[E::kPerVector];
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) total[i] = 0.0f;
  for (int group = blockIdx.y; group < num_groups; group += p.num_experts) {
    const int64_t vector = static_cast<int64_t>(blockIdx.x) * kRowLanes + lane;
    AddRows<kType>(p, FindGroup(p.groups, group), vector, total);
  }
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) parts[strip][lane * E::kPerVector + i] = total[i];
  __syncthreads();
  for (int column = threadIdx.x; column < kColumns; column += kThreads) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kColumns + column;
    if (at >= p.width) continue;
    float sum = 0.0f;
#pragma unroll
    for (int each = 0; each < kStrips; ++each) sum += parts[each][column];
    float* to = p.sums + static_cast<int64_t>(blockIdx.y) * p.width + at;
    *to = p.adds ? *to + sum : sum;
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
  const int columns = rows::kRowLanes * rows::kVectorBytes / element;
  const dim3 grid((p.width + columns - 1) / columns, p.num_experts);
  return rows::LaunchForFloat(p.type, [&](auto type) {
    rows::GroupSumsKernel<decltype(type)::value><<<grid, rows::kThreads, 0, stream>>>(p);
  });
}

}  // namespace cuda
}  // namespace ep_runtime
