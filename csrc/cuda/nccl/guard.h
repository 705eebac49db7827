// Fills results of exchanges that an abort made invalid.
#ifndef EP_RUNTIME_CUDA_NCCL_GUARD_H_
#define EP_RUNTIME_CUDA_NCCL_GUARD_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace nccl {

// Fills `bytes` bytes of `array` (device) with `byte` if `*spoiled` (device) is not 0 when the
// kernel runs; otherwise the kernel ends at once.
cudaError_t LaunchGuard(cudaStream_t stream, const uint32_t* spoiled, void* array, int64_t bytes,
                        uint8_t byte);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_GUARD_H_
