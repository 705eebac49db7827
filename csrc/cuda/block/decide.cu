#include "cuda/block/decide.h"
#include "cuda/movement/call/progress.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

constexpr int kThreads = 256;

// One warp.
__global__ void DecideKernel(const __grid_constant__ DecideParams p) {
  int32_t rows = 0;
  for (int e = threadIdx.x; e < p.sizes.experts; e += 32) rows += p.group_sizes[e];
  rows = __reduce_add_sync(~0u, rows);
  if (threadIdx.x != 0) return;
  const bool whole = *p.most <= p.sizes.rows;
  const bool made = p.made == nullptr || *p.made != 0;
  const bool kept = made && rows <= p.sizes.kept_rows && p.sizes.kept_rows > 0;
  *p.decision = {whole, !whole, whole && kept, whole && !kept, {0, 0}};
  if (!whole && p.parts > 1) CountRounds(p.group, BoardIndex(p.name), p.parts - 1);
}

__global__ void SlotsKernel(const __grid_constant__ SlotsParams p) {
  if (LeftOut(p.wanted)) return;
  const int slot = blockIdx.x * kThreads + threadIdx.x;
  if (slot < p.slots) p.out[slot] = p.dst_rank[slot] < 0 ? -1 : p.topk_idx[slot];
}

}  // namespace

cudaError_t LaunchDecide(cudaStream_t stream, const DecideParams& params) {
  DecideKernel<<<1, 32, 0, stream>>>(params);
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
