// RunStarts: decides whether a run starts.
#ifndef EP_RUNTIME_CORE_RUNS_RUN_STARTS_H_
#define EP_RUNTIME_CORE_RUNS_RUN_STARTS_H_

#include <cstdint>
#include <mutex>

#include "core/base/recent_map.h"
#include "core/base/status.h"

namespace ep_runtime {

// Decides whether a run starts. Its first call in this process decides for all devices, because a
// device that left a run while others stayed would hang XLA's next collective.
class RunStarts {
 public:
  // Calls `look()` for the run's first call, and returns the same for its later calls.
  template <typename Look>
  Status Decide(uint64_t run, const Look& look) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto [start, is_new] = starts_.Add(run);
    if (is_new) start = look();
    return start;
  }

 private:
  static constexpr size_t kMaxRuns = 1024;  // more than XLA keeps in flight

  std::mutex mutex_;
  RecentMap<uint64_t, Status, kMaxRuns> starts_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_RUNS_RUN_STARTS_H_
