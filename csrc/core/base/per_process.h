// What one process has once.
#ifndef EP_RUNTIME_CORE_BASE_PER_PROCESS_H_
#define EP_RUNTIME_CORE_BASE_PER_PROCESS_H_

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace ep_runtime {

// This process's T, made when it is first asked for. A forked child gets a fresh one: its parent's
// threads are gone and its mappings too, so it must open groups of its own.
//
// Never destroyed: XLA's threads may still end calls while the process exits. What a fork abandons
// leaks in the child for the same reason.
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
