// Launches that only some data ask for: what decides is on the device, and no host waits for it.
#ifndef EP_RUNTIME_CUDA_WANTED_CUH_
#define EP_RUNTIME_CUDA_WANTED_CUH_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

// Before anything else in a kernel: whether the whole launch has nothing to do. `wanted` is [1],
// written by an earlier launch of the stream; null: there is something to do.
__device__ __forceinline__ bool LeftOut(const int32_t* wanted) {
  return wanted != nullptr && *wanted == 0;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_WANTED_CUH_
