// FailedRuns: runs in which a call failed.
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

// Runs of this process in which a call failed, with the first error of each. XLA cannot cancel the
// run's other devices, so their calls check this and end with the same error. XLA counts run ids
// per program and continues counting if a program is compiled again, so no id is reused while it is
// remembered. The oldest runs are forgotten, long after their last call.
class FailedRuns {
 public:
  // Records `error` unless the run has failed already: the first error stays. `publish` must make
  // the error visible to other processes. It runs before this process's devices can see the error,
  // because a device that sees it leaves its call, and peers in other processes then look for the
  // reason.
  void Add(uint64_t run, const Status& error, const std::function<void()>& publish = [] {});
  // Like Add, for a run that another process identifies by a call site that it reached.
  void AddElsewhere(const Launches::Reached& reached, const Status& error);
  // Returns the error of the run, from this or another process, or success.
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
