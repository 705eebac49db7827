#include "cuda/block/decide.h"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

constexpr int kThreads = 256;

// One warp.
__global__ void DecideKernel(BlockSizes sizes, const int32_t* most, const int32_t* group_sizes,
                             Decision* decision) {
  int32_t rows = 0;
  for (int e = threadIdx.x; e < sizes.experts; e += 32) rows += group_sizes[e];
  rows = __reduce_add_sync(~0u, rows);
  if (threadIdx.x != 0) return;
  const bool whole = *most <= sizes.rows;
  const bool kept = rows <= sizes.kept_rows && sizes.kept_rows > 0;
  *decision = {whole, !whole, whole && kept, whole && !kept};
}

__global__ void SlotsKernel(const __grid_constant__ SlotsParams p) {
  if (LeftOut(p.wanted)) return;
  const int slot = blockIdx.x * kThreads + threadIdx.x;
  if (slot < p.slots) p.out[slot] = p.dst_rank[slot] < 0 ? -1 : p.topk_idx[slot];
}

}  // namespace

cudaError_t LaunchDecide(cudaStream_t stream, const BlockSizes& sizes, const int32_t* most,
                         const int32_t* group_sizes, Decision* decision) {
  DecideKernel<<<1, 32, 0, stream>>>(sizes, most, group_sizes, decision);
  return cudaGetLastError();
}

cudaError_t LaunchSlots(cudaStream_t stream, const SlotsParams& params) {
  if (params.slots <= 0) return cudaErrorInvalidValue;
  SlotsKernel<<<(params.slots + kThreads - 1) / kThreads, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
