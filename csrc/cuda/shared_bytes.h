#ifndef EP_RUNTIME_CUDA_SHARED_BYTES_H_
#define EP_RUNTIME_CUDA_SHARED_BYTES_H_

#include <cuda_runtime.h>

#include <map>
#include <utility>

namespace ep_runtime {
namespace cuda {

// Lets launches of a kernel on the current device take so many bytes of dynamic shared memory. Asks
// the driver where none took as many before: a block call has launches that only look and end.
template <typename Kernel>
cudaError_t AllowSharedBytes(Kernel* kernel, size_t bytes) {
  thread_local std::map<std::pair<Kernel*, int>, size_t> allowed;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
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
