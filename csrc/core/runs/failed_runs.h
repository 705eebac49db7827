#ifndef EP_RUNTIME_CORE_RUNS_FAILED_RUNS_H_
#define EP_RUNTIME_CORE_RUNS_FAILED_RUNS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "core/base/recent_map.h"
#include "core/base/status.h"
#include "core/runs/launches.h"

namespace ep_runtime {

// Program runs of this process in which a call failed, with the first error of each. XLA cannot
// cancel the other devices of a run, so their calls look here and end with the same error.
// XLA counts run ids per program and goes on where a program is compiled again, so none comes
// back while it is remembered. Bounded: the oldest are forgotten, long after their last call.
class FailedRuns {
 public:
  // Unless the run is known to have failed: its first error stays. `publish` tells other processes
  // before this one's devices can see the error, because a device that sees it leaves its call, and
  // its peers elsewhere then look for the reason.
  void Add(uint64_t run, const Status& error, const std::function<void()>& publish = [] {});
  // The same of a run of another process, which names it by a call site that it reached.
  void AddElsewhere(const Launches::Reached& reached, const Status& error);
  // The error of that run here or elsewhere, or success.
  Status Get(uint64_t run, const Launches& launches) const;

 private:
  static constexpr size_t kMaxRuns = 1024;
  using Elsewhere = std::pair<uint64_t, uint32_t>;  // site, launch

  mutable std::mutex mutex_;
  std::atomic<bool> any_{false};
  RecentMap<uint64_t, Status, kMaxRuns> errors_;
  RecentMap<Elsewhere, Status, kMaxRuns> elsewhere_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_RUNS_FAILED_RUNS_H_
