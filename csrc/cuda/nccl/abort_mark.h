// AbortMark: tells kernels that their communicator is aborted.
#ifndef EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
#define EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_

#include <cstdint>
#include <memory>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// A mark that tells kernels behind a communicator's exchanges that it is aborted. NCCL's kernels
// then leave their waits, and copy bytes of other calls from their buffers. Thread-safe.
class AbortMark {
 public:
  virtual ~AbortMark() = default;
  // Call it before the communicator is aborted, with its device current. Waits shortly for the
  // device.
  virtual void Set() = 0;
  // Put it behind an exchange on `stream`: fills the array with `byte` if the mark is set.
  virtual Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) = 0;
};

// Makes CUDA's mark for the current device.
Status MakeCudaAbortMark(std::unique_ptr<AbortMark>* out);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_ABORT_MARK_H_
