// Fills results of exchanges that an abort made invalid.
#include <algorithm>

#include "cuda/fill.cuh"
#include "cuda/nccl/guard.h"

namespace ep_runtime {
namespace nccl {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 16;  // few, because blocks nearly always have nothing to do

__global__ void __launch_bounds__(kThreads)
    GuardKernel(const uint32_t* spoiled, cuda::Output output) {
  __shared__ uint32_t now;
  if (threadIdx.x == 0) {
    uint32_t read;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(read) : "l"(spoiled) : "memory");
    now = read;
  }
  __syncthreads();
  if (now == 0) return;
  cuda::FillOutput(output, int64_t{blockIdx.x} * kThreads + threadIdx.x,
                   int64_t{gridDim.x} * kThreads);
}

}  // namespace

cudaError_t LaunchGuard(cudaStream_t stream, const uint32_t* spoiled, void* array, int64_t bytes,
                        uint8_t byte) {
  if (bytes == 0) return cudaSuccess;
  const int64_t blocks = std::min(kMaxBlocks, (bytes / 16 + kThreads - 1) / kThreads + 1);
  GuardKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      spoiled, {array, bytes, byte * 0x01010101u});
  return cudaGetLastError();
}

}  // namespace nccl
}  // namespace ep_runtime
