// CountedArrays: arrays of which only counted rows cross between nodes.
#include "ffi/nccl/counted_arrays.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/device/driver.h"

namespace ep_runtime {
namespace {

constexpr std::chrono::microseconds kPause(5);

// A pool of host memory that the device copies to while a call waits. The pool grows to the most
// that all threads have used at one time. Its memory is never freed, because that would wait for
// the device.
class PinnedWords {
 public:
  // Takes free memory of at least `count` words, or allocates it.
  Status Take(size_t count) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto fits = [&](const Words& each) { return each.count >= count; };
      const auto found = std::find_if(free_.begin(), free_.end(), fits);
      if (found != free_.end()) {
        taken_ = *found;
        free_.erase(found);
        return Status();
      }
    }
    void* made = nullptr;
    EP_RETURN_IF_CUDA(cudaHostAlloc(&made, count * sizeof(int32_t), cudaHostAllocPortable));
    taken_ = {static_cast<int32_t*>(made), count};
    return Status();
  }
  // Returns the memory to the pool. Do not call this after a wait that timed out, because the
  // device may still write.
  void GiveBack() {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(taken_);
  }
  int32_t* data() const { return taken_.data; }

 private:
  struct Words {
    int32_t* data;
    size_t count;
  };
  inline static std::mutex mutex_;
  inline static std::vector<Words> free_;

  Words taken_{};
};

}  // namespace

Status ReadCounts(const nccl::NcclGroup& group, std::string_view call, cudaStream_t stream,
                  const int32_t* device, std::vector<int32_t>* counts) {
  PinnedWords words;
  EP_RETURN_IF_ERROR(words.Take(counts->size()));
  EP_RETURN_IF_CUDA(cudaMemcpyAsync(words.data(), device, counts->size() * sizeof(int32_t),
                                    cudaMemcpyDeviceToHost, stream));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(group.options().op_timeout_ns);
  for (;;) {
    const cudaError_t found = cudaStreamQuery(stream);
    if (found == cudaSuccess) break;
    if (found != cudaErrorNotReady) return cuda::Check(found, std::string(call).c_str());
    EP_RETURN_IF_ERROR(group.alive()());
    if (std::chrono::steady_clock::now() > deadline) {
      return Error(Code::kDeadlineExceeded, "OpTimeoutError")
          .Says(std::string(call) + ": how many rows cross was not known within " +
                std::to_string(static_cast<double>(group.options().op_timeout_ns) * 1e-9) + " s");
    }
    std::this_thread::sleep_for(kPause);
  }
  std::copy_n(words.data(), counts->size(), counts->begin());
  words.GiveBack();
  return Status();
}

Status CountedSide::Read(const Operand& array, int64_t peers) {
  lined_up = array.dims().size() == 2;
  rows = array.dim(lined_up ? 0 : 1);
  counts.resize(peers);
  first.resize(peers);
  if (rows >= 1 && (lined_up || (array.dims().size() == 3 && array.dim(0) == peers))) {
    return Status();
  }
  return array.MustBe("[" + std::to_string(peers) + ", rows, X] or [rows, X]");
}

Dims CountedSide::DimsOf(int64_t width) const {
  const auto peers = static_cast<int64_t>(counts.size());
  return lined_up ? Dims{rows, width} : Dims{peers, rows, width};
}

void CountedSide::Take(const int32_t* given) {
  int64_t before = 0;
  for (size_t peer = 0; peer < counts.size(); ++peer) {
    first[peer] = lined_up ? before : static_cast<int64_t>(peer) * rows;
    const int64_t most = lined_up ? rows - before : rows;
    counts[peer] = static_cast<int32_t>(std::clamp<int64_t>(given[peer], 0, most));
    before += counts[peer];
  }
}

Status CountedArrays::Add(const Operand& rows, const Operand& result) {
  if (arrays_.empty()) {
    EP_RETURN_IF_ERROR(sent_.Read(rows, peers_.count));
    EP_RETURN_IF_ERROR(received_.Read(result, peers_.count));
  }
  const int64_t width = rows.dim(sent_.lined_up ? 1 : 2);
  nccl::CountedRows one{};
  EP_RETURN_IF_ERROR(rows.Read(rows.type(), sent_.DimsOf(width), &one.sent));
  EP_RETURN_IF_ERROR(result.Read(rows.type(), received_.DimsOf(width), &one.received));
  one.row_bytes = width * rows.element_bytes();
  one.sent_first = sent_.first.data();
  one.sent_count = sent_.counts.data();
  one.received_first = received_.first.data();
  one.received_count = received_.counts.data();
  arrays_.push_back(one);
  return Status();
}

void CountedArrays::Take(const int32_t* counts) {
  if (arrays_.empty()) return;
  sent_.Take(counts);
  received_.Take(counts + peers_.count);
}

Status CountedArrays::CopyOwn(cudaStream_t stream) const {
  for (const nccl::CountedRows& each : arrays_) {
    const int32_t own = std::min(sent_.counts[peers_.self], received_.counts[peers_.self]);
    EP_RETURN_IF_CUDA(cudaMemcpyAsync(each.From(peers_.self), each.For(peers_.self),
                                      own * each.row_bytes, cudaMemcpyDeviceToDevice, stream));
  }
  return Status();
}

int CountedArrays::Send(const nccl::Api& api, nccl::Comm* comm, cudaStream_t stream) const {
  int result = nccl::kSuccess;
  for (const nccl::CountedRows& each : arrays_) {
    if (result == nccl::kSuccess) result = nccl::SendRows(api, peers_, each, comm, stream);
  }
  return result;
}

}  // namespace ep_runtime
