// Groups of rows, as kernels are told of them.
#ifndef EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_
#define EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_

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

// A transposed copy of rows has them along memory, where products of 8-bit and tf32 values want the
// contracted dim. Each group begins at a multiple of kPaddedTo there and has zeros up to the next
// one: products take whole stages and see nobody else's rows.
constexpr int32_t kPaddedTo = 128;

__host__ __device__ constexpr int32_t PadRows(int32_t rows) {
  return (rows + kPaddedTo - 1) / kPaddedTo * kPaddedTo;
}
// Elements of a slab's line in such a copy, whatever the sizes are.
__host__ __device__ constexpr int64_t PaddedSlabRows(int64_t slab_rows, int64_t groups_per_slab) {
  const int64_t groups = groups_per_slab < slab_rows ? groups_per_slab : slab_rows;
  return (slab_rows + (kPaddedTo - 1) * groups) / kPaddedTo * kPaddedTo;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_PRODUCT_GROUPS_H_
