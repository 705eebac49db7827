#ifndef EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
#define EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_

#include <cuda_runtime.h>

#include "core/base/status.h"

namespace ep_runtime {
namespace nccl {

// A stream beside XLA's, on which exchanges run while kernels of the same call do the rest. One for
// each device, of the highest priority: an exchange's few blocks must not queue behind thousands.
class SideStream {
 public:
  // The current device's. Made when first asked for, never destroyed.
  static Status OfDevice(SideStream** out);

  cudaStream_t stream() const { return stream_; }
  // What comes here waits for what `stream` has been given by now.
  Status Follow(cudaStream_t stream);
  // What comes on `stream` waits for what was given here by now.
  Status Join(cudaStream_t stream);

 private:
  Status Open();

  cudaStream_t stream_ = nullptr;
  cudaEvent_t given_ = nullptr;  // recorded anew each time: a wait keeps what it found
  cudaEvent_t done_ = nullptr;
};

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
