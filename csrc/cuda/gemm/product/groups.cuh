// Finds the rows of groups on the device, from the groups' sizes.
#ifndef EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_CUH_
#define EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

__device__ __forceinline__ int32_t GroupSize(const Groups& groups, int group, int32_t left) {
  return min(max(__ldg(groups.sizes + group), 0), left);
}

// Returns a group's rows; `start` counts from the first slab's first row. Call this with whole
// warps.
__device__ inline Rows FindRows(const Groups& groups, int group) {
  const int slab = group / groups.groups_per_slab;
  int32_t before = 0;
  for (int g = slab * groups.groups_per_slab + threadIdx.x % 32; g < group; g += 32) {
    before += GroupSize(groups, g, groups.slab_rows);
  }
  before = min(__reduce_add_sync(0xFFFFFFFFu, before), groups.slab_rows);
  return {slab * groups.slab_rows + before, GroupSize(groups, group, groups.slab_rows - before)};
}

struct PaddedRows {
  Rows rows;   // `start` counts from the slab's first row
  int32_t at;  // where the rows begin in the slab's line of the copy
};

// How many rows of a slab are before one of its groups.
struct RowsBefore {
  uint32_t rows;
  uint32_t padded;
};

// Inclusive sums over a warp's lanes, cut at `limit`. No value may exceed `limit`.
__device__ __forceinline__ uint32_t SumLanes(uint32_t value, uint32_t limit) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) value = min(value + below, limit);
  }
  return value;
}

// Returns the rows of group first + lane of the slab. `before` advances to the next 32 groups. Call
// this with whole warps.
__device__ inline PaddedRows PlaceRows(const Groups& groups, int slab, int first,
                                       RowsBefore* before) {
  const int lane = threadIdx.x % 32;
  const uint32_t limit = groups.slab_rows;
  uint32_t size = 0;
  if (first + lane < groups.groups_per_slab) {
    size = GroupSize(groups, slab * groups.groups_per_slab + first + lane, groups.slab_rows);
  }
  const uint32_t end = min(before->rows + SumLanes(size, limit), limit);
  uint32_t start = __shfl_up_sync(0xFFFFFFFFu, end, 1);
  if (lane == 0) start = before->rows;
  const uint32_t padded = PadRows(end - start);
  const uint32_t padded_end = before->padded + SumLanes(padded, INT32_MAX);
  before->rows = __shfl_sync(0xFFFFFFFFu, end, 31);
  before->padded = __shfl_sync(0xFFFFFFFFu, padded_end, 31);
  return {{static_cast<int32_t>(start), static_cast<int32_t>(end - start)},
          static_cast<int32_t>(padded_end - padded)};
}

// Returns a group's range in the transposed copy, with zeros up to a multiple of `depth`, which
// must divide kPaddedTo. Call this with whole warps.
__device__ inline Rows FindPaddedRows(const Groups& groups, int group, int32_t depth = kPaddedTo) {
  const int slab = group / groups.groups_per_slab;
  const int inside = group % groups.groups_per_slab;
  RowsBefore before{0, 0};
  PaddedRows mine{};
  for (int first = 0; first <= inside; first += 32) mine = PlaceRows(groups, slab, first, &before);
  const int64_t line = slab * PaddedSlabRows(groups.slab_rows, groups.groups_per_slab);
  const int32_t size = __shfl_sync(0xFFFFFFFFu, mine.rows.size, inside % 32);
  return {static_cast<int32_t>(line) + __shfl_sync(0xFFFFFFFFu, mine.at, inside % 32),
          (size + depth - 1) / depth * depth};
}

// Returns the rows stored at `at`, a multiple of kPaddedTo, in the slab's line of the copy: up to
// kPaddedTo rows of one group, none past the last group. Call this with whole warps.
__device__ inline Rows FindRowsAt(const Groups& groups, int slab, int32_t at) {
  RowsBefore before{0, 0};
  for (int first = 0; first < groups.groups_per_slab; first += 32) {
    const PaddedRows mine = PlaceRows(groups, slab, first, &before);
    const int32_t inside = at - mine.at;
    const bool here = inside >= 0 && inside < mine.rows.size;
    const uint32_t found = __ballot_sync(0xFFFFFFFFu, here);
    if (found == 0) continue;
    const int lane = __ffs(found) - 1;
    const int32_t start = mine.rows.start + inside;
    const int32_t size = min(mine.rows.size - inside, kPaddedTo);
    return {slab * groups.slab_rows + __shfl_sync(0xFFFFFFFFu, start, lane),
            __shfl_sync(0xFFFFFFFFu, size, lane)};
  }
  return {0, 0};
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_CUH_
