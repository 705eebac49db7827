// Kernels that only benchmarks run.
#include <algorithm>

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/bench/bench_kernels.h"
#include "cuda/movement/call/call.cuh"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kSharedBytes = 220 * 1024;  // row buffers of a block

__global__ void __launch_bounds__(1024, 1) CeilingKernel(CeilingParams params) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ LoadBarrier barriers[kMaxWarps];
  const DeviceGroup& group = *params.group;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  if (blockIdx.x == 0 && threadIdx.x == 0) params.result[0] = static_cast<int32_t>(gridDim.x);
  if (threadIdx.x % 32 != 0 || LoadRelaxed(&group.open) == 0) return;
  const auto row_bytes = static_cast<uint32_t>(params.row_bytes);
  const auto* rows = static_cast<const uint8_t*>(params.rows);
  // Each rank has a share of the lane of every other rank, so that no two ranks write to the same
  // place.
  const int shares = max(group.ep_size - 1, 1);
  const auto most = static_cast<uint32_t>(group.entries_offset / shares / row_bytes);
  const auto room = [&](int rank) {
    const int share = min(group.ep_rank - (group.ep_rank > rank ? 1 : 0), shares - 1);
    return group.windows + rank * group.window_stride + share * int64_t{most} * row_bytes;
  };
  uint8_t* buffer = dynamic + static_cast<size_t>(warp) * row_bytes;
  barriers[warp].Init();
  FenceBarrierInit();
  uint32_t parity = 0;
  for (int i = blockIdx.x * warps + warp; i < params.count;
       i += static_cast<int>(gridDim.x) * warps, parity ^= 1) {
    WaitStoresRead<0>();
    barriers[warp].Load(buffer, rows + static_cast<size_t>(i) * row_bytes, row_bytes);
    barriers[warp].Wait(parity);
    for (int j = 0; j < params.top_k; ++j) {
      const int rank = params.dst_rank[i * params.top_k + j];
      const auto row = static_cast<uint32_t>(params.dst_row[i * params.top_k + j]);
      if (rank < 0 || rank >= group.ep_size || row >= most) continue;
      BulkStore(room(rank) + static_cast<size_t>(row) * row_bytes, buffer, row_bytes);
    }
    CommitStores();
  }
  WaitStores<0>();
}

__global__ void ClockKernel(ClockParams params) {
  params.token_out[0] = params.token[0];
  const uint64_t now = GlobalTimerNs();
  params.now[0] = static_cast<uint32_t>(now);
  params.now[1] = static_cast<uint32_t>(now >> 32);
  while (GlobalTimerNs() - now < params.hold_ns) __nanosleep(1000);
}

}  // namespace

cudaError_t LaunchCeiling(cudaStream_t stream, const CeilingParams& params) {
  const int fitting = kSharedBytes / params.row_bytes;
  const int warps = std::min({params.warps, kMaxWarps, fitting});
  if (warps < 1 || params.blocks < 1) return cudaErrorInvalidConfiguration;
  const int shared = warps * params.row_bytes;
  const cudaError_t error = AllowSharedBytes(CeilingKernel, shared);
  if (error != cudaSuccess) return error;
  CeilingKernel<<<params.blocks, warps * 32, shared, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchClock(cudaStream_t stream, const ClockParams& params) {
  ClockKernel<<<1, 1, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
