// SideStream: a stream for exchanges between nodes.
#include "cuda/nccl/side_stream.h"

#include <map>
#include <mutex>

#include "cuda/device/driver.h"

namespace ep_runtime {
namespace nccl {

Status SideStream::OfDevice(SideStream** out) {
  static std::mutex mutex;
  static auto* of_devices = new std::map<int, SideStream>();
  int device = -1;
  EP_RETURN_IF_CUDA(cudaGetDevice(&device));
  std::lock_guard<std::mutex> lock(mutex);
  SideStream& found = (*of_devices)[device];
  if (found.stream_ == nullptr) EP_RETURN_IF_ERROR(found.Open());
  *out = &found;
  return Status();
}

Status SideStream::Open() {
  int least = 0;
  int greatest = 0;
  EP_RETURN_IF_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  for (cudaEvent_t* event : {&given_, &done_}) {
    EP_RETURN_IF_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  return cuda::Check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                     "cudaStreamCreateWithPriority");
}

Status SideStream::Follow(cudaStream_t stream) {
  EP_RETURN_IF_CUDA(cudaEventRecord(given_, stream));
  return cuda::Check(cudaStreamWaitEvent(stream_, given_, 0), "cudaStreamWaitEvent");
}

Status SideStream::Join(cudaStream_t stream) {
  EP_RETURN_IF_CUDA(cudaEventRecord(done_, stream_));
  return cuda::Check(cudaStreamWaitEvent(stream, done_, 0), "cudaStreamWaitEvent");
}

}  // namespace nccl
}  // namespace ep_runtime
