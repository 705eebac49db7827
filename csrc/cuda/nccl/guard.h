// Fills results of exchanges that an abort spoiled.
#ifndef EP_RUNTIME_CUDA_NCCL_GUARD_H_
#define EP_RUNTIME_CUDA_NCCL_GUARD_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace nccl {

// Fills `array` (device, `bytes` of it) with `byte` if `*spoiled` (device) is not 0 when the kernel
// runs; otherwise its blocks end at once.
cudaError_t LaunchGuard(cudaStream_t stream, const uint32_t* spoiled, void* array, int64_t bytes,
                        uint8_t byte);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_GUARD_H_
