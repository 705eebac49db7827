// CudaAbortMark: an abort mark in device memory.
#include "cuda/nccl/abort_mark.h"

#include <cuda_runtime.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/nccl/guard.h"

namespace ep_runtime {
namespace nccl {
namespace {

// If a device takes longer to copy four bytes, it does not run later kernels either.
constexpr std::chrono::milliseconds kSetWithin(200);
constexpr int kWordsOfPage = 1024;

// Words that the marks of one device share. They are never freed, because a kernel that a hanging
// device runs late must still find its word.
struct DeviceWords {
  uint32_t* one = nullptr;  // a word in host memory, the source of the copy
  cudaStream_t stream = nullptr;
  uint32_t* page = nullptr;
  int used = kWordsOfPage;

  Status NewWord(uint32_t** word) {
    if (stream == nullptr) EP_RETURN_IF_ERROR(Open());
    if (used == kWordsOfPage) {
      const size_t bytes = kWordsOfPage * sizeof(uint32_t);
      EP_RETURN_IF_CUDA(cudaMalloc(&page, bytes));
      EP_RETURN_IF_CUDA(cudaMemsetAsync(page, 0, bytes, stream));
      EP_RETURN_IF_CUDA(cudaStreamSynchronize(stream));
      used = 0;
    }
    *word = &page[used++];
    return Status();
  }

 private:
  Status Open() {
    EP_RETURN_IF_CUDA(cudaHostAlloc(&one, sizeof(uint32_t), cudaHostAllocPortable));
    *one = 1;
    return cuda::Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                       "cudaStreamCreateWithFlags");
  }
};

// A mark in device memory, which a kernel reads in a microsecond. Reading a word in host memory
// after every exchange would take ten times as long. The copy engine sets the mark, so setting it
// waits for no kernel.
class CudaAbortMark : public AbortMark {
 public:
  Status Open() {
    static std::mutex mutex;
    static auto* of_devices = new std::map<int, DeviceWords>();
    int device = -1;
    EP_RETURN_IF_CUDA(cudaGetDevice(&device));
    std::lock_guard<std::mutex> lock(mutex);
    DeviceWords& words = (*of_devices)[device];
    EP_RETURN_IF_ERROR(words.NewWord(&word_));
    one_ = words.one;
    stream_ = words.stream;
    return Status();
  }

  // Waits for the copy, because the communicator's kernels continue once it is aborted, and must
  // see the mark.
  void Set() override {
    cudaMemcpyAsync(word_, one_, sizeof(uint32_t), cudaMemcpyHostToDevice, stream_);
    const auto end = std::chrono::steady_clock::now() + kSetWithin;
    while (cudaStreamQuery(stream_) == cudaErrorNotReady &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  Status Guard(Stream stream, void* array, int64_t bytes, uint8_t byte) override {
    return cuda::Check(LaunchGuard(static_cast<cudaStream_t>(stream), word_, array, bytes, byte),
                       "the kernel behind an exchange");
  }

 private:
  const uint32_t* one_ = nullptr;
  uint32_t* word_ = nullptr;
  cudaStream_t stream_ = nullptr;
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
