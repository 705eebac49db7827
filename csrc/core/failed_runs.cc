#include "core/failed_runs.h"

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

Status FailedRuns::Get(uint64_t run) const {
  if (!any_.load(std::memory_order_acquire)) return Status();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = errors_.find(run);
  return found == errors_.end() ? Status() : found->second;
}

}  // namespace ep_runtime
