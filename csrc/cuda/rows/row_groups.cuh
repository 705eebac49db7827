// Finds the rows of a slab that belong to groups, on the device, from the groups' sizes.
//
// Letters: S slabs of C rows, L groups of a slab, which follow each other from the slab's first row
// on. Rows past the last group are slack.
#ifndef EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_CUH_
#define EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_CUH_

#include <cuda_runtime.h>

#include "cuda/rows/row_groups.h"

namespace ep_runtime {
namespace cuda {
namespace rows {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Returns the rows of group `group`, counted over all slabs, at most `left`.
__device__ __forceinline__ int32_t GroupSize(const RowGroups& groups, int64_t group, int32_t left) {
  return min(max(__ldg(groups.sizes + group), 0), left);
}

// Returns the number of rows in a slab's groups; without sizes, all rows. Call this with whole
// warps.
__device__ inline int32_t SlabRows(const RowGroups& groups, int slab) {
  if (groups.sizes == nullptr) return groups.slab_rows;
  const int64_t first = static_cast<int64_t>(slab) * groups.groups_per_slab;
  int32_t sum = 0;
  for (int g = threadIdx.x % 32; g < groups.groups_per_slab; g += 32) {
    sum += GroupSize(groups, first + g, groups.slab_rows);
  }
  return min(__reduce_add_sync(kAllLanes, sum), groups.slab_rows);
}

// Sets ends[l] to the row after the last row of group l of the slab. Ends with a barrier. Call this
// with whole blocks.
__device__ inline void GroupEnds(const RowGroups& groups, int slab, int32_t* ends) {
  if (groups.sizes == nullptr) {
    if (threadIdx.x == 0) ends[0] = groups.slab_rows;
  } else if (threadIdx.x < 32) {
    const int64_t first = static_cast<int64_t>(slab) * groups.groups_per_slab;
    int32_t before = 0;
    for (int base = 0; base < groups.groups_per_slab; base += 32) {
      const int g = base + threadIdx.x;
      int32_t sum = g < groups.groups_per_slab ? GroupSize(groups, first + g, groups.slab_rows) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      sum = min(before + sum, groups.slab_rows);
      if (g < groups.groups_per_slab) ends[g] = sum;
      before = __shfl_sync(kAllLanes, sum, 31);
    }
  }
  __syncthreads();
}

// Returns the group of a row, which must be in a group.
__device__ inline int GroupOf(const int32_t* ends, int count, int32_t row) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (row < ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace rows
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_CUH_
