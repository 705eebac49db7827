// RunningCalls: counts the running calls of a group.
#ifndef EP_RUNTIME_CORE_GROUPS_RUNNING_CALLS_H_
#define EP_RUNTIME_CORE_GROUPS_RUNNING_CALLS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace ep_runtime {

// Counts the running calls of a group, so that closing the group can wait for them.
class RunningCalls {
 public:
  // Returns false once the group is closed.
  bool Begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed()) return false;
    ++running_;
    return true;
  }
  void End() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0) none_.notify_all();
  }
  // Refuses further calls and waits at most `timeout_ns` for running calls. Returns false if some
  // still run.
  bool Close(int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_.store(true, std::memory_order_release);
    return none_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                          [&] { return running_ == 0; });
  }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable none_;
  int64_t running_ = 0;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_RUNNING_CALLS_H_
