#ifndef EP_RUNTIME_CORE_FAILED_RUNS_H_
#define EP_RUNTIME_CORE_FAILED_RUNS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "core/status.h"

namespace ep_runtime {

// Program runs of this process in which a call failed, with the first error of each. XLA cannot
// cancel the other devices of a run, so their calls look here and end with the same error.
// XLA counts run ids per program and goes on where a program is compiled again, so none comes
// back while it is remembered. Bounded: the oldest are forgotten, long after their last call.
class FailedRuns {
 public:
  // False where the run is known to have failed; its first error stays.
  bool Add(uint64_t run, const Status& error);
  // The error of that run, or success.
  Status Get(uint64_t run) const;

 private:
  static constexpr size_t kMaxRuns = 1024;

  mutable std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::unordered_map<uint64_t, Status> errors_;
  std::deque<uint64_t> order_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_FAILED_RUNS_H_
