#include "cuda/nccl/abort_mark.h"

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <new>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/nccl/guard.h"

namespace ep_runtime {
namespace nccl {
namespace {

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

class CudaAbortMark : public AbortMark {
 public:
  Status Open() { return NewWord(&word_); }

  void Set() override { word_->store(1, std::memory_order_seq_cst); }

  Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) override {
    void* word = nullptr;
    EP_RETURN_IF_CUDA(cudaHostGetDevicePointer(&word, word_, 0));
    return cuda::Check(LaunchGuard(static_cast<cudaStream_t>(stream),
                                   static_cast<const uint32_t*>(word), array, bytes, byte),
                       "the kernel behind an exchange");
  }

 private:
  std::atomic<uint32_t>* word_ = nullptr;
};

}  // namespace

Status MakeCudaAbortMark(std::unique_ptr<AbortMark>* out) {
  auto made = std::make_unique<CudaAbortMark>();
  EP_RETURN_IF_ERROR(made->Open());
  *out = std::move(made);
  return Status();
}

}  // namespace nccl
}  // namespace ep_runtime
