// Kernels that run before and after all other kernels of a block call.
#include "cuda/block/decide.h"
#include "cuda/fill.cuh"
#include "cuda/movement/call/progress.cuh"
#include "cuda/movement/call/row_math.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

constexpr int kThreads = 256;

// Fills the Decision. Runs as one warp.
__global__ void DecideKernel(const __grid_constant__ DecideParams p) {
  int32_t rows = 0;
  for (int e = threadIdx.x; e < p.sizes.experts; e += 32) rows += p.group_sizes[e];
  rows = __reduce_add_sync(~0u, rows);
  if (threadIdx.x != 0) return;
  const bool whole = *p.most <= p.sizes.rows;
  const bool made = p.made == nullptr || *p.made != 0;
  const bool kept = made && rows <= p.sizes.kept_rows && p.sizes.kept_rows > 0;
  *p.decision = {whole, !whole, whole && kept, whole && !kept, {0, 0}};
  if (!whole && p.chunks > 1) CountRounds(p.group, BoardIndex(p.name), p.chunks - 1);
}

__global__ void SlotsKernel(const __grid_constant__ SlotsParams p) {
  if (LeftOut(p.wanted)) return;
  const int slot = blockIdx.x * kThreads + threadIdx.x;
  if (slot < p.slots) p.out[slot] = p.dst_rank[slot] < 0 ? -1 : p.topk_idx[slot];
}

constexpr int kMostResults = 7;
constexpr int kEndBlocks = 16;  // few, because blocks nearly always have nothing to do

struct Results {
  int count;
  Output arrays[kMostResults];

  void Add(void* data, int64_t values, RowType type) {
    const int64_t bytes = values * (type == RowType::kF32 ? 4 : 2);
    if (data != nullptr) arrays[count++] = {data, bytes, NanPattern(type)};
  }
};

__global__ void EndKernel(const DeviceGroup* group, const __grid_constant__ Results results) {
  if (group->failed == 0 && group->spoiled == 0) return;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int i = 0; i < results.count; ++i) {
    FillOutput(results.arrays[i], thread, kEndBlocks * kThreads);
  }
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

cudaError_t LaunchEnd(cudaStream_t stream, const BlockParams& p, bool backward) {
  const BlockSizes& s = p.sizes;
  const RowType tokens = p.wide ? RowType::kF32 : p.type;
  const RowType weights = p.weight_type == FloatType::kF32 ? RowType::kF32 : p.type;
  const int64_t experts = s.experts, own = experts - s.spare, halves = p.dwi_up != nullptr ? 2 : 1;
  Results results{};
  if (backward) {
    results.Add(p.dx, int64_t{s.tokens} * s.hidden, tokens);
    results.Add(p.d_weights, int64_t{s.tokens} * s.top_k, RowType::kF32);
    results.Add(p.dwi, own * s.hidden * s.columns / halves, weights);
    results.Add(p.dwi_up, own * s.hidden * s.columns / halves, weights);
    results.Add(p.dwo, own * s.inner * s.hidden, weights);
    results.Add(p.d_wi_bias, experts * s.columns, RowType::kF32);
    results.Add(p.d_wo_bias, experts * s.hidden, RowType::kF32);
  } else {
    results.Add(p.y, int64_t{s.tokens} * s.hidden, tokens);
    results.Add(p.kept, int64_t{s.kept_rows} * s.columns, p.type);
  }
  EndKernel<<<kEndBlocks, kThreads, 0, stream>>>(p.group, results);
  return cudaGetLastError();
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
