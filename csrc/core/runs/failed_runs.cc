// FailedRuns: runs in which a call failed.
#include "core/runs/failed_runs.h"

namespace ep_runtime {

void FailedRuns::Add(uint64_t run, const Status& error, const std::function<void()>& publish) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!errors_.Add(run, error).second) return;
  publish();
  any_.store(true, std::memory_order_release);
}

void FailedRuns::AddElsewhere(const Launches::Reached& reached, const Status& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!elsewhere_.Add({reached.site, reached.launch}, error).second) return;
  any_.store(true, std::memory_order_release);
}

Status FailedRuns::Get(uint64_t run, const Launches& launches) const {
  if (!any_.load(std::memory_order_acquire)) return Status();
  std::lock_guard<std::mutex> lock(mutex_);
  if (const Status* error = errors_.Find(run)) return *error;
  if (elsewhere_.empty()) return Status();
  for (const Launches::Reached& reached : launches.ReachedIn(run)) {
    if (const Status* error = elsewhere_.Find({reached.site, reached.launch})) return *error;
  }
  return Status();
}

}  // namespace ep_runtime
