// CallThreads: the threads on which CPU calls run.
#ifndef EP_RUNTIME_CORE_BASE_CALL_THREADS_H_
#define EP_RUNTIME_CORE_BASE_CALL_THREADS_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

namespace ep_runtime {

// Runs each call on its own thread. Threads are reused, and their number has no limit. A limit
// could cause a deadlock, because a call waits for peers whose calls may still be queued behind it.
// Completing a call's future runs XLA kernels of that device on the call's thread, so threads have
// full-size stacks.
class CallThreads {
 public:
  void Run(std::function<void()> work);

 private:
  struct Worker {
    std::condition_variable wake;
    std::function<void()> work;
  };

  static void* ThreadMain(void* self);
  void Serve(std::function<void()> first);
  void Start(std::function<void()> work);

  std::mutex mutex_;
  std::vector<Worker*> idle_;  // the last thread to become idle is reused first
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_CALL_THREADS_H_
