// Arguments of a product's kernel, except tensor maps.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_KERNEL_ARGUMENTS_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_KERNEL_ARGUMENTS_CUH_

#include <cstdint>

#include "cuda/gemm/product/groups.cuh"
#include "cuda/gemm/tile/store_activated.cuh"
#include "cuda/gemm/tile/store_tile.cuh"
#include "cuda/gemm/tile/tickets.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// Scales of 8-bit operands. The scales of contracted element `depth` are lhs[row * lhs_width +
// depth / 128] and rhs[expert * rhs_plane + column / 128 * rhs_column + depth / 128 * rhs_depth].
// In a weight gradient they are lhs[depth / 128 * lhs_width + row / 128] and rhs[depth / 128 *
// rhs_depth + column / 128].
struct Scales {
  const float* lhs;
  const float* rhs;
  int32_t last_row;   // last row of lhs; tiles may extend past it
  int32_t lhs_width;  // in blocks
  int32_t rhs_plane;  // distance between experts, in floats
  int32_t rhs_column;
  int32_t rhs_depth;
  int32_t last_column;  // in blocks; tiles may extend past it
  int32_t part_step;    // blocks from a tile's first 128 columns to its last 128
};

struct KernelArguments {
  Groups groups;
  OutShape out;
  ActivationShape activation;
  int32_t depth;  // contracted elements, unless the group sizes give them
  int32_t band;
  int32_t half;        // columns of a pair's first array; INT32_MAX: there is one array
  int32_t first_slot;  // the first expert whose weight is in a slot; INT32_MAX: none
  Scales scales;
  const int32_t* wanted;  // [1] or null
  Tickets tickets;
};

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_KERNEL_ARGUMENTS_CUH_
