// Streams of a device beside those that XLA gives its calls: what a call launches on one of them
// runs beside what it launches on XLA's, which goes on only once both are done.
#ifndef EP_RUNTIME_CUDA_DEVICE_SIDE_STREAMS_H_
#define EP_RUNTIME_CUDA_DEVICE_SIDE_STREAMS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace ep_runtime {
namespace cuda {

// Of one group on one device, which is current while its methods run. Streams are made where one
// is missing and live as long as this does; graphs that were captured on them live longer.
class SideStreams {
 public:
  SideStreams() = default;
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // Makes the event and the first stream, so that no call has to.
  cudaError_t Open();
  // SMs of the device.
  int32_t processors() const { return processors_; }

 private:
  friend class Fork;

  cudaError_t Add();
  // One that is in the capture of `main`, or in none. A stream that joined a capture stays in it
  // until that ends, which may be after another thread's call.
  cudaError_t Find(cudaStream_t main, cudaStream_t* out);

  std::mutex mutex_;  // of whoever has forked
  // Records of an event do not disturb waits for earlier ones: one serves all calls.
  cudaEvent_t event_ = nullptr;
  std::vector<cudaStream_t> streams_;
  int32_t processors_ = 0;
};

// One call's launches beside those of `main`. Legal while `main` is captured.
class Fork {
 public:
  // `streams` may be null: then side() is `main`, and what is launched there runs first.
  Fork(SideStreams* streams, cudaStream_t main);
  ~Fork() { Join(); }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  // Of the constructor. After an error side() is `main`.
  cudaError_t error() const { return error_; }
  cudaStream_t side() const { return side_; }
  // From here on `main` waits for all that was launched on side().
  cudaError_t Join();

 private:
  cudaError_t Order(cudaStream_t first, cudaStream_t second);

  SideStreams* streams_;
  cudaStream_t main_;
  cudaStream_t side_;
  cudaError_t error_ = cudaSuccess;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_SIDE_STREAMS_H_
