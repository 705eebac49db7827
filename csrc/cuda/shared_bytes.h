// Allows a kernel's launches to use dynamic shared memory.
#ifndef EP_RUNTIME_CUDA_SHARED_BYTES_H_
#define EP_RUNTIME_CUDA_SHARED_BYTES_H_

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace ep_runtime {
namespace cuda {

// Allows launches of a kernel on the current device to use `bytes` of dynamic shared memory. Calls
// the driver only if no earlier launch used as many, because many launches of a block call are
// short: they only check `wanted` and end. The driver has one limit for all threads, so a smaller
// limit would break another thread's launches. This keeps the largest.
template <typename Kernel>
cudaError_t AllowSharedBytes(Kernel* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<Kernel*, int>, size_t> allowed;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes));
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_SHARED_BYTES_H_
