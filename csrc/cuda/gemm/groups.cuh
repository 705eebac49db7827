// Which rows the groups have, as the device reads it off their sizes.
#ifndef EP_RUNTIME_CUDA_GEMM_GROUPS_CUH_
#define EP_RUNTIME_CUDA_GEMM_GROUPS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {
namespace gemm {

struct Groups {
  const int32_t* sizes;  // [slabs, groups_per_slab]
  int32_t num_groups;    // of all slabs
  int32_t groups_per_slab;
  int32_t num_experts;
  int32_t slab_rows;
};

struct Rows {
  int32_t start;
  int32_t size;
};

__device__ __forceinline__ int32_t GroupSize(const Groups& groups, int group, int32_t left) {
  return min(max(__ldg(groups.sizes + group), 0), left);
}

// Called by whole warps. `start` is counted from the first row of all slabs.
__device__ inline Rows FindRows(const Groups& groups, int group) {
  const int slab = group / groups.groups_per_slab;
  int32_t before = 0;
  for (int g = slab * groups.groups_per_slab + threadIdx.x % 32; g < group; g += 32) {
    before += GroupSize(groups, g, groups.slab_rows);
  }
  before = min(__reduce_add_sync(0xFFFFFFFFu, before), groups.slab_rows);
  return {slab * groups.slab_rows + before, GroupSize(groups, group, groups.slab_rows - before)};
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_GROUPS_CUH_
