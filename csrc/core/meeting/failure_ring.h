// FailureRing: publishes and reads failed runs on the board.
#ifndef EP_RUNTIME_CORE_MEETING_FAILURE_RING_H_
#define EP_RUNTIME_CORE_MEETING_FAILURE_RING_H_

#include <cstdint>
#include <mutex>

#include "core/base/status.h"
#include "core/memory/board.h"
#include "core/runs/failed_runs.h"
#include "core/runs/launches.h"

namespace ep_runtime {

// Publishes failed runs on the board, so that a run that fails in one process ends in all
// processes.
class FailureRing {
 public:
  FailureRing() = default;

  // Attaches the ring to a board. Import reads only failures published later, because earlier runs
  // are over.
  void Bind(BoardHeader* header, FailureRecord* records);

  // Publishes a failed run. `reached` identifies the run by a call site that this process has
  // reached in the run.
  void Publish(const Launches::Reached& reached, const Status& error);
  // Adds failures published since the last Import to `runs`.
  void Import(FailedRuns* runs);

 private:
  Word64* claimed_ = nullptr;
  FailureRecord* records_ = nullptr;
  std::mutex mutex_;
  std::atomic<uint64_t> seen_{0};
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEETING_FAILURE_RING_H_
