// Lets a launch end at once if its data do not need it. A flag on the device decides, so that the
// host need not wait.
#ifndef EP_RUNTIME_CUDA_WANTED_CUH_
#define EP_RUNTIME_CUDA_WANTED_CUH_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

// Whether the whole launch has nothing to do. Kernels call this first. `wanted` is [1], written by
// an earlier launch of the stream; null: there is work.
__device__ __forceinline__ bool LeftOut(const int32_t* wanted) {
  return wanted != nullptr && *wanted == 0;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_WANTED_CUH_
