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
//
// XLA's run ids start anew with each executable of one program, so a run fails only the call sites
// that existed when it failed, and only for a while: whoever compiles the program again after an
// error gets the same ids again.
class FailedRuns {
 public:
  // `newest_site`: the last call site made so far in this process.
  void Add(uint64_t run, uint64_t newest_site, const Status& error);
  // The error of that run as far as it concerns `site`, or success.
  Status Get(uint64_t run, uint64_t site) const;

 private:
  static constexpr size_t kMaxRuns = 1024;
  static constexpr int64_t kKeepNs = 600'000'000'000;

  struct Failure {
    Status error;
    uint64_t newest_site;
    int64_t failed_ns;
  };

  mutable std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::unordered_map<uint64_t, Failure> failures_;
  std::deque<uint64_t> order_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_FAILED_RUNS_H_
