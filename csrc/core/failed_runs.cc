#include "core/failed_runs.h"

#include "core/futex.h"

namespace ep_runtime {

void FailedRuns::Add(uint64_t run, uint64_t newest_site, const Status& error) {
  const int64_t now_ns = NowNs();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = failures_.find(run);
  if (found != failures_.end()) {
    Failure& known = found->second;
    // Sites made since belong to another executable, whose run of this id fails now.
    if (newest_site > known.newest_site || now_ns - known.failed_ns > kKeepNs) {
      known = {error, newest_site, now_ns};
    }
    return;
  }
  failures_.emplace(run, Failure{error, newest_site, now_ns});
  order_.push_back(run);
  if (order_.size() > kMaxRuns) {
    failures_.erase(order_.front());
    order_.pop_front();
  }
  any_.store(true, std::memory_order_release);
}

Status FailedRuns::Get(uint64_t run, uint64_t site) const {
  if (!any_.load(std::memory_order_acquire)) return Status();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = failures_.find(run);
  if (found == failures_.end()) return Status();
  const Failure& failure = found->second;
  if (site > failure.newest_site || NowNs() - failure.failed_ns > kKeepNs) return Status();
  return failure.error;
}

}  // namespace ep_runtime
