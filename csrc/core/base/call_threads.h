// CallThreads: threads that CPU calls run on.
#ifndef EP_RUNTIME_CORE_BASE_CALL_THREADS_H_
#define EP_RUNTIME_CORE_BASE_CALL_THREADS_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

namespace ep_runtime {

// One thread per running call, reused, without a limit. A limit would be a deadlock: a call waits
// for peers whose calls may still be queued behind it. Completing a call's future runs XLA
// kernels of that device on this thread, so threads have full-size stacks.
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
  std::vector<Worker*> idle_;  // the last to go idle is the first to be used again
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_CALL_THREADS_H_
