// AbortMark: lets kernels see that their communicator is aborted.
#ifndef EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
#define EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_

#include <cstdint>
#include <memory>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// A mark that tells kernels after an exchange that its communicator was aborted. After an
// abort, NCCL's kernels leave their waits and copy stale bytes from their buffers. Thread-safe.
class AbortMark {
 public:
  virtual ~AbortMark() = default;
  // Sets the mark. Call this before the communicator is aborted, with its device current. Waits
  // briefly for the device.
  virtual void Set() = 0;
  // Launches a kernel on `stream` that fills the array with `byte` if the mark is set. Call this
  // after launching an exchange.
  virtual Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) = 0;
};

// Makes CUDA's mark for the current device.
Status MakeCudaAbortMark(std::unique_ptr<AbortMark>* out);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
