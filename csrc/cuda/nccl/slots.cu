// Kernels for values of slots, and for rows without a slot.
#include "cuda/nccl/slots.h"

namespace ep_runtime {
namespace nccl {
namespace {

constexpr int kThreads = 256;
constexpr int kEmptyThreads = 128;
constexpr int kEmptyBlocks = 32;  // blocks that share the rows of one zone
constexpr int64_t kMaxBlocks = 1024;

unsigned BlocksFor(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

__device__ int64_t First() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ int64_t Step() { return int64_t{gridDim.x} * kThreads; }
__device__ bool HasRow(const Slots& slots, int32_t row) {
  return static_cast<uint32_t>(row) < static_cast<uint32_t>(slots.capacity);
}

__global__ void __launch_bounds__(kThreads)
    ToRowsKernel(Slots slots, const float* of_slot, float* of_row) {
  for (int64_t i = First(); i < slots.count; i += Step()) {
    const int32_t row = slots.row[i];
    if (HasRow(slots, row)) of_row[row] = of_slot == nullptr ? 1.0f : of_slot[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    ToSlotsKernel(Slots slots, const float* of_row, float* of_slot) {
  for (int64_t i = First(); i < slots.count; i += Step()) {
    const int32_t row = slots.row[i];
    of_slot[i] = HasRow(slots, row) ? of_row[row] : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads)
    PickSlotsKernel(const int32_t* dst_rank, int64_t count, int32_t ranks, const float* of_ranks,
                    float* of_slot) {
  for (int64_t i = First(); i < count; i += Step()) {
    const int32_t rank = dst_rank[i];
    const bool there = static_cast<uint32_t>(rank) < static_cast<uint32_t>(ranks);
    of_slot[i] = there ? of_ranks[rank * count + i] : 0.0f;
  }
}

// blockIdx.y is the expert, or L for rows past the last zone.
__global__ void __launch_bounds__(kEmptyThreads)
    EmptyRowsKernel(const __grid_constant__ EmptyRowsParams p) {
  __shared__ int64_t bounds[2];
  const int expert = blockIdx.y;
  const bool past = expert == p.experts;
  if (threadIdx.x < 32) {
    int64_t before = 0;
    for (int e = threadIdx.x; e < expert; e += 32) before += max(p.group_sizes[e], 0);
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
    if (threadIdx.x == 0) {
      bounds[0] = past ? before : before + max(p.kept[expert], 0);
      bounds[1] = past ? p.capacity : min(before + p.group_sizes[expert], int64_t{p.capacity});
    }
  }
  __syncthreads();
  const int64_t vectors = p.row_bytes / 16;
  for (int64_t row = bounds[0] + blockIdx.x; row < bounds[1]; row += gridDim.x) {
    if (p.of_row != nullptr && threadIdx.x == 0 && (!past || p.past_of_row)) p.of_row[row] = 0.0f;
    if (past && !p.past_rows) continue;
    auto* to = static_cast<uint4*>(p.rows) + row * vectors;
    for (int64_t v = threadIdx.x; v < vectors; v += kEmptyThreads) to[v] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

cudaError_t LaunchToRows(cudaStream_t stream, const Slots& slots, const float* of_slot,
                         float* of_row) {
  ToRowsKernel<<<BlocksFor(slots.count), kThreads, 0, stream>>>(slots, of_slot, of_row);
  return cudaGetLastError();
}

cudaError_t LaunchToSlots(cudaStream_t stream, const Slots& slots, const float* of_row,
                          float* of_slot) {
  ToSlotsKernel<<<BlocksFor(slots.count), kThreads, 0, stream>>>(slots, of_row, of_slot);
  return cudaGetLastError();
}

cudaError_t LaunchPickSlots(cudaStream_t stream, const int32_t* dst_rank, int64_t count,
                            int32_t ranks, const float* of_ranks, float* of_slot) {
  PickSlotsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(dst_rank, count, ranks, of_ranks,
                                                             of_slot);
  return cudaGetLastError();
}

cudaError_t LaunchEmptyRows(cudaStream_t stream, const EmptyRowsParams& params) {
  if (params.experts < 1 || params.experts > 65534 || params.row_bytes % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(kEmptyBlocks, params.experts + 1);
  EmptyRowsKernel<<<grid, kEmptyThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace nccl
}  // namespace ep_runtime
