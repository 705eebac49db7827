#include "cuda/nccl/side_stream.h"

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/nccl/guard.h"

namespace ep_runtime {
namespace nccl {
namespace {

// More than one op has under way; made before the first step, which must not allocate.
constexpr int kEvents = 16;
constexpr int kWordsOfPage = 1024;

// A word of host memory that every device reads. It stays: a kernel that a hanging device runs late
// must not find it freed.
Status NewWord(std::atomic<uint32_t>** out) {
  static std::mutex mutex;
  static std::atomic<uint32_t>* page = nullptr;
  static int used = kWordsOfPage;
  std::lock_guard<std::mutex> lock(mutex);
  if (used == kWordsOfPage) {
    void* made = nullptr;
    EP_RETURN_IF_CUDA(cudaHostAlloc(&made, kWordsOfPage * sizeof(uint32_t),
                                    cudaHostAllocPortable | cudaHostAllocMapped));
    page = static_cast<std::atomic<uint32_t>*>(made);
    used = 0;
  }
  *out = new (&page[used++]) std::atomic<uint32_t>(0);
  return Status();
}

class CudaSideStream : public SideStream {
 public:
  // Destroying does not wait: CUDA frees what is in use once it is done.
  ~CudaSideStream() override {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
    for (const auto& [address, event] : marks_) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  Status Open() {
    EP_RETURN_IF_ERROR(NewWord(&spoiled_));
    int least = 0;
    int greatest = 0;
    EP_RETURN_IF_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    // Blocks of NCCL's kernels go before those that wait their turn of a large kernel beside them:
    // a peer's kernel already spins for them.
    EP_RETURN_IF_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    for (int i = 0; i < kEvents; ++i) EP_RETURN_IF_ERROR(AddEvent());
    return Status();
  }

  void Spoil() override { spoiled_->store(1, std::memory_order_seq_cst); }

  Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) override {
    void* word = nullptr;
    EP_RETURN_IF_CUDA(cudaHostGetDevicePointer(&word, spoiled_, 0));
    return cuda::Check(LaunchGuard(static_cast<cudaStream_t>(stream),
                                   static_cast<const uint32_t*>(word), array, bytes, byte),
                       "the kernel behind an exchange");
  }

  Stream stream() const override { return stream_; }

  Status Follow(Stream before) override {
    std::lock_guard<std::mutex> lock(mutex_);
    cudaEvent_t event = nullptr;
    EP_RETURN_IF_ERROR(TakeEvent(&event));
    const Status status = Order(static_cast<cudaStream_t>(before), event, stream_);
    free_.push_back(event);
    return status;
  }

  Status Mark(const void* address) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = marks_.find(address);
    if (found == marks_.end()) {
      cudaEvent_t event = nullptr;
      EP_RETURN_IF_ERROR(TakeEvent(&event));
      found = marks_.emplace(address, event).first;
    }
    return cuda::Check(cudaEventRecord(found->second, stream_), "cudaEventRecord");
  }

  Status Await(const void* address, Stream after) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = marks_.find(address);
    if (found == marks_.end()) {
      return Internal("no exchange was begun whose rows arrive where this program awaits them");
    }
    const cudaEvent_t event = found->second;
    marks_.erase(found);
    free_.push_back(event);
    return cuda::Check(cudaStreamWaitEvent(static_cast<cudaStream_t>(after), event),
                       "cudaStreamWaitEvent");
  }

 private:
  Status AddEvent() {
    cudaEvent_t event = nullptr;
    EP_RETURN_IF_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    free_.push_back(event);
    return Status();
  }
  Status TakeEvent(cudaEvent_t* event) {
    if (free_.empty()) EP_RETURN_IF_ERROR(AddEvent());
    *event = free_.back();
    free_.pop_back();
    return Status();
  }
  // A wait holds what was recorded when it was asked for: the event may be recorded again at once.
  static Status Order(cudaStream_t first, cudaEvent_t event, cudaStream_t second) {
    EP_RETURN_IF_CUDA(cudaEventRecord(event, first));
    return cuda::Check(cudaStreamWaitEvent(second, event), "cudaStreamWaitEvent");
  }

  std::atomic<uint32_t>* spoiled_ = nullptr;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> free_;
  // One for each exchange that is begun and not awaited. A run that ends between the two leaves
  // its own, for the next exchange at that address.
  std::unordered_map<const void*, cudaEvent_t> marks_;
};

}  // namespace

Status MakeCudaSideStream(std::unique_ptr<SideStream>* out) {
  auto made = std::make_unique<CudaSideStream>();
  EP_RETURN_IF_ERROR(made->Open());
  *out = std::move(made);
  return Status();
}

}  // namespace nccl
}  // namespace ep_runtime
