#ifndef EP_RUNTIME_CUDA_SHARED_BYTES_H_
#define EP_RUNTIME_CUDA_SHARED_BYTES_H_

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace ep_runtime {
namespace cuda {

// Lets launches of a kernel on the current device take so many bytes of dynamic shared memory. Asks
// the driver only where no launch took as many before: a block call has launches that only look and
// end. The driver keeps one limit for all threads, and a smaller one would end what another thread
// was allowed, so the largest is kept for all of them too.
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
