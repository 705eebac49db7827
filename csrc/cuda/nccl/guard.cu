#include <algorithm>

#include "cuda/nccl/guard.h"

namespace ep_runtime {
namespace nccl {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 16;  // nearly always they do nothing

__global__ void __launch_bounds__(kThreads)
    GuardKernel(const uint32_t* spoiled, uint8_t* array, int64_t bytes, uint32_t pattern) {
  __shared__ uint32_t now;
  if (threadIdx.x == 0) {
    uint32_t read;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(read) : "l"(spoiled) : "memory");
    now = read;
  }
  __syncthreads();
  if (now == 0) return;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  const bool aligned = reinterpret_cast<uintptr_t>(array) % 16 == 0;
  const int64_t vectors = aligned ? bytes / 16 : 0;
  const uint4 filled = make_uint4(pattern, pattern, pattern, pattern);
  for (int64_t i = thread; i < vectors; i += threads) reinterpret_cast<uint4*>(array)[i] = filled;
  for (int64_t i = vectors * 16 + thread; i < bytes; i += threads) {
    array[i] = static_cast<uint8_t>(pattern);
  }
}

}  // namespace

cudaError_t LaunchGuard(cudaStream_t stream, const uint32_t* spoiled, void* array, int64_t bytes,
                        uint8_t byte) {
  if (bytes == 0) return cudaSuccess;
  const int64_t blocks = std::min(kMaxBlocks, (bytes / 16 + kThreads - 1) / kThreads + 1);
  GuardKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      spoiled, static_cast<uint8_t*>(array), bytes, byte * 0x01010101u);
  return cudaGetLastError();
}

}  // namespace nccl
}  // namespace ep_runtime
