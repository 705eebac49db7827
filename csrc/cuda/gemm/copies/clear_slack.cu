// Sets rows past the last group of every slab to zero.
#include "cuda/gemm/copies/clear_slack.h"
#include "cuda/gemm/product/groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerProcessor = 4;

// blockIdx.y is the slab.
__global__ void __launch_bounds__(kThreads)
    ClearSlackKernel(const Groups groups, uint4* rows, int64_t row_vectors) {
  const int slab = blockIdx.y;
  int64_t first = static_cast<int64_t>(slab) * groups.slab_rows;
  const int64_t end = (first + groups.slab_rows) * row_vectors;
  if (groups.groups_per_slab > 0) {
    const Rows last = FindRows(groups, (slab + 1) * groups.groups_per_slab - 1);
    first = last.start + last.size;
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t begin = first * row_vectors + static_cast<int64_t>(blockIdx.x) * kThreads;
  for (int64_t i = begin + threadIdx.x; i < end; i += stride) rows[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace

cudaError_t LaunchClearSlack(cudaStream_t stream, const Groups& groups, int num_slabs, void* rows,
                             int64_t row_bytes, int processors) {
  const dim3 grid((kBlocksPerProcessor * processors + num_slabs - 1) / num_slabs, num_slabs);
  ClearSlackKernel<<<grid, kThreads, 0, stream>>>(groups, static_cast<uint4*>(rows),
                                                  row_bytes / static_cast<int64_t>(sizeof(uint4)));
  return cudaGetLastError();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
