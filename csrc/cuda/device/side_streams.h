// Streams of a device in addition to the streams that XLA passes to calls. Launches on a side
// stream overlap launches on XLA's stream, which then waits for both.
#ifndef EP_RUNTIME_CUDA_DEVICE_SIDE_STREAMS_H_
#define EP_RUNTIME_CUDA_DEVICE_SIDE_STREAMS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace ep_runtime {
namespace cuda {

// Side streams of one group on one device. The device must be current while methods run. A stream
// is created if none is free, and lives as long as this object; graphs captured on it may live
// longer.
class SideStreams {
 public:
  SideStreams() = default;
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // Creates the event and the first stream, so that calls need not create them.
  cudaError_t Open();
  // SMs of the device.
  int32_t processors() const { return processors_; }

 private:
  friend class Fork;

  cudaError_t Add();
  // Finds a stream that is in the capture of `main`, or in none. A stream that joined a capture
  // stays in it until the capture ends, which may be after another thread's call.
  cudaError_t Find(cudaStream_t main, cudaStream_t* out);

  std::mutex mutex_;  // held from Fork to Join
  // One event serves all calls, because a new record does not change waits for earlier records.
  cudaEvent_t event_ = nullptr;
  std::vector<cudaStream_t> streams_;
  int32_t processors_ = 0;
};

// Puts some launches of a call on a side stream, where they overlap the call's launches on `main`.
// Allowed while `main` is captured.
class Fork {
 public:
  // If `streams` is null, side() is `main`, so that launches run one after another.
  Fork(SideStreams* streams, cudaStream_t main);
  ~Fork() { Join(); }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  // Returns the constructor's error. After an error side() is `main`.
  cudaError_t error() const { return error_; }
  cudaStream_t side() const { return side_; }
  // Makes `main` wait for everything launched on side().
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
