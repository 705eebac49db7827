// Futexes and a lock for memory that processes share.
#ifndef EP_RUNTIME_CORE_BASE_FUTEX_H_
#define EP_RUNTIME_CORE_BASE_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ep_runtime {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "futex words are plain uint32_t");

inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Sleeps while `word` holds `seen`, at most `timeout_ns`. May return early. The futexes are not
// private, because processes share the board.
inline void FutexWait(Word* word, uint32_t seen, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void FutexWakeAll(Word* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void FutexWakeOne(Word* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Longest sleep before a waiter checks for poison, failed runs and its deadline again.
constexpr int64_t kWaitSliceNs = 100 * 1000 * 1000;

// A mutex in shared memory: 0 free, 1 held, 2 held with sleepers.
class SharedLock {
 public:
  explicit SharedLock(Word* word) : word_(word) {}

  // Returns false if the lock stays taken for `timeout_ns`, or once `abandoned()` returns true
  // because nobody needs the lock any more. In both cases the lock's holder is stopped or dead.
  template <typename Abandoned>
  bool Lock(int64_t timeout_ns, Abandoned abandoned) {
    uint32_t free = 0;
    if (word_->compare_exchange_strong(free, 1, std::memory_order_acquire)) return true;
    const int64_t deadline = NowNs() + timeout_ns;
    while (word_->exchange(2, std::memory_order_acquire) != 0) {
      if (NowNs() > deadline || abandoned()) return false;
      FutexWait(word_, 2, kWaitSliceNs);
    }
    return true;
  }

  void Unlock() {
    if (word_->exchange(0, std::memory_order_release) == 2) FutexWakeOne(word_);
  }

 private:
  Word* word_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_FUTEX_H_
