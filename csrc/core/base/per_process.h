// OfThisProcess: one object of a type for each process.
#ifndef EP_RUNTIME_CORE_BASE_PER_PROCESS_H_
#define EP_RUNTIME_CORE_BASE_PER_PROCESS_H_

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace ep_runtime {

// Returns this process's T, created on first use. A forked child gets a new one, because its
// parent's threads and mappings are gone: the child must open its own groups.
//
// T is never destroyed, because XLA's threads may still end calls while the process exits. For the
// same reason a forked child never destroys its copy of the parent's object.
template <typename T>
T& OfThisProcess() {
  static std::atomic<T*> made{nullptr};
  static std::once_flag once;
  std::call_once(once, [] {
    made.store(new T, std::memory_order_release);
    pthread_atfork(nullptr, nullptr, [] { made.store(new T, std::memory_order_release); });
  });
  return *made.load(std::memory_order_acquire);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_PER_PROCESS_H_
