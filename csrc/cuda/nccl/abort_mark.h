#ifndef EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
#define EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_

#include <cstdint>
#include <memory>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// A word by which kernels behind a communicator's exchanges know that it is aborted: NCCL's kernels
// leave their waits then, and copy what their buffers hold of other calls. Thread-safe.
class AbortMark {
 public:
  virtual ~AbortMark() = default;
  // The communicator is about to be aborted; its device is current. Waits for the device, shortly.
  virtual void Set() = 0;
  // Behind an exchange on `stream`: where the mark is set, the array is filled with `byte`.
  virtual Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) = 0;
};

// Of CUDA, for the current device.
Status MakeCudaAbortMark(std::unique_ptr<AbortMark>* out);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
