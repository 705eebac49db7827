#include "core/runs/failed_runs.h"

namespace ep_runtime {

bool FailedRuns::Add(uint64_t run, const Status& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!errors_.emplace(run, error).second) return false;
  order_.push_back(run);
  if (order_.size() > kMaxRuns) {
    errors_.erase(order_.front());
    order_.pop_front();
  }
  any_.store(true, std::memory_order_release);
  return true;
}

void FailedRuns::AddElsewhere(const Launches::Reached& reached, const Status& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Elsewhere key{reached.site, reached.launch};
  if (!elsewhere_.emplace(key, error).second) return;
  elsewhere_order_.push_back(key);
  if (elsewhere_order_.size() > kMaxRuns) {
    elsewhere_.erase(elsewhere_order_.front());
    elsewhere_order_.pop_front();
  }
  any_.store(true, std::memory_order_release);
}

Status FailedRuns::Get(uint64_t run, const Launches& launches) const {
  if (!any_.load(std::memory_order_acquire)) return Status();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = errors_.find(run);
  if (found != errors_.end()) return found->second;
  if (elsewhere_.empty()) return Status();
  for (const Launches::Reached& reached : launches.ReachedIn(run)) {
    auto there = elsewhere_.find({reached.site, reached.launch});
    if (there != elsewhere_.end()) return there->second;
  }
  return Status();
}

}  // namespace ep_runtime
