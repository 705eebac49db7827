#ifndef EP_RUNTIME_CORE_RUNS_RUN_STARTS_H_
#define EP_RUNTIME_CORE_RUNS_RUN_STARTS_H_

#include <cstdint>
#include <mutex>

#include "core/base/recent_map.h"
#include "core/base/status.h"

namespace ep_runtime {

// Whether a run may go on, as its first call in this process found: that decides for all devices.
// One that left a run which the others stay in would hang XLA's next collective.
class RunStarts {
 public:
  // What `look()` says where this is the run's first call; what it said then where it is not.
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
