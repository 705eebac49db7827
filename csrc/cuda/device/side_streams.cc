// SideStreams: streams for launches that overlap XLA's stream.
#include "cuda/device/side_streams.h"

namespace ep_runtime {
namespace cuda {
namespace {

struct Capture {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;

  bool none() const { return status == cudaStreamCaptureStatusNone; }
};

cudaError_t CaptureOf(cudaStream_t stream, Capture* out) {
  return cudaStreamGetCaptureInfo(stream, &out->status, &out->id);
}

}  // namespace

SideStreams::~SideStreams() {
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  if (event_ != nullptr) cudaEventDestroy(event_);
}

cudaError_t SideStreams::Open() {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
  return error != cudaSuccess ? error : Add();
}

cudaError_t SideStreams::Add() {
  int least = 0, greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest);
  }
  if (error == cudaSuccess) streams_.push_back(stream);
  return error;
}

cudaError_t SideStreams::Find(cudaStream_t main, cudaStream_t* out) {
  Capture wanted;
  cudaError_t error = CaptureOf(main, &wanted);
  for (size_t i = 0; error == cudaSuccess; ++i) {
    if (i == streams_.size()) error = Add();
    Capture capture;
    if (error == cudaSuccess) error = CaptureOf(streams_[i], &capture);
    if (error != cudaSuccess) break;
    if (!capture.none() && (wanted.none() || capture.id != wanted.id)) continue;
    *out = streams_[i];
    break;
  }
  return error;
}

Fork::Fork(SideStreams* streams, cudaStream_t main) : streams_(streams), main_(main), side_(main) {
  if (streams_ == nullptr) return;
  lock_ = std::unique_lock<std::mutex>(streams_->mutex_);
  cudaStream_t side = main;
  error_ = streams_->Find(main_, &side);
  if (error_ == cudaSuccess) error_ = Order(main_, side);
  if (error_ == cudaSuccess) side_ = side;
}

cudaError_t Fork::Join() {
  if (side_ == main_) return error_;
  const cudaError_t error = Order(side_, main_);
  side_ = main_;
  lock_.unlock();
  return error;
}

cudaError_t Fork::Order(cudaStream_t first, cudaStream_t second) {
  const cudaError_t error = cudaEventRecord(streams_->event_, first);
  return error != cudaSuccess ? error : cudaStreamWaitEvent(second, streams_->event_, 0);
}

}  // namespace cuda
}  // namespace ep_runtime
