// SideStream: a stream for exchanges between nodes.
#ifndef EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
#define EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_

#include <cuda_runtime.h>

#include "core/base/status.h"

namespace ep_runtime {
namespace nccl {

// A stream in addition to XLA's, on which exchanges run while other kernels of the same call run.
// Each device has one such stream, with the highest priority: an exchange's few blocks must not
// queue behind thousands of blocks.
class SideStream {
 public:
  // Returns the current device's side stream, created on first use and never destroyed.
  static Status OfDevice(SideStream** out);

  cudaStream_t stream() const { return stream_; }
  // Makes later work on this stream wait for the present work of `stream`.
  Status Follow(cudaStream_t stream);
  // Makes later work on `stream` wait for the present work of this stream.
  Status Join(cudaStream_t stream);

 private:
  Status Open();

  cudaStream_t stream_ = nullptr;
  cudaEvent_t given_ =
      nullptr;  // recorded again each time; earlier waits keep the record that they found
  cudaEvent_t done_ = nullptr;
};

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
