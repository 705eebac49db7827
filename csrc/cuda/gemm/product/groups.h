// Groups of rows, as arguments of kernels.
#ifndef EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_
#define EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {
namespace gemm {

struct Groups {
  const int32_t* sizes;  // [slabs, groups_per_slab]
  int32_t num_groups;    // groups in all slabs
  int32_t groups_per_slab;
  int32_t num_experts;
  int32_t slab_rows;
};

struct Rows {
  int32_t start;
  int32_t size;
};

// In a transposed copy the rows' dim is contiguous, because products of 8-bit and tf32 values need
// a contiguous contracted dim. In the copy each group begins at a multiple of kPaddedTo, with zeros
// up to the next group. So products take whole stages and never read another group's rows.
constexpr int32_t kPaddedTo = 128;

__host__ __device__ constexpr int32_t PadRows(int32_t rows) {
  return (rows + kPaddedTo - 1) / kPaddedTo * kPaddedTo;
}
// Elements of a slab's line in such a copy, enough for any sizes of groups.
__host__ __device__ constexpr int64_t PaddedSlabRows(int64_t slab_rows, int64_t groups_per_slab) {
  const int64_t groups = groups_per_slab < slab_rows ? groups_per_slab : slab_rows;
  return (slab_rows + (kPaddedTo - 1) * groups) / kPaddedTo * kPaddedTo;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_
