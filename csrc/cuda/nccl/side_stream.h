#ifndef EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
#define EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_

#include <cstdint>
#include <memory>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// What a communicator has on its device: a stream beside XLA's, for exchanges that one call begins
// and another awaits, and a word by which kernels know that it is aborted. Nothing here waits on
// the host. Thread-safe.
class SideStream {
 public:
  virtual ~SideStream() = default;
  // The communicator is about to be aborted. NCCL's kernels leave their waits then, and copy what
  // their buffers hold of other calls.
  virtual void Spoil() = 0;
  // Behind an exchange on `stream`: where it was spoiled, the array is filled with `byte`.
  virtual Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) = 0;
  virtual Stream stream() const = 0;
  // What comes on it next waits for what `before` has by now.
  virtual Status Follow(Stream before) = 0;
  // Keeps the place where the stream is, by the address of what is there then. An address that is
  // marked again has the later place: streams are in order, so who awaits it misses nothing.
  virtual Status Mark(const void* address) = 0;
  // What comes on `after` next waits for that place, which is forgotten.
  virtual Status Await(const void* address, Stream after) = 0;
};

// Of CUDA, for the current device.
Status MakeCudaSideStream(std::unique_ptr<SideStream>* out);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_SIDE_STREAM_H_
