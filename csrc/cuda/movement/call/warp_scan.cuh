// Sums over the lanes of a warp.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_WARP_SCAN_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_WARP_SCAN_CUH_

#include <cuda_runtime.h>

namespace ep_runtime {
namespace cuda {

// Returns the inclusive sum over the lanes up to this one. Whole warps call this.
template <typename T>
__device__ inline T WarpScan(T value) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_WARP_SCAN_CUH_
