// RankTelemetry: a rank's record on the board.
#ifndef EP_RUNTIME_CORE_MEETING_TELEMETRY_H_
#define EP_RUNTIME_CORE_MEETING_TELEMETRY_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/memory/board.h"

namespace ep_runtime {

// The board's record of one running call.
struct CallRecord {
  RankState state = RankState::kMeeting;
  OpCode op = OpCode::kNone;
  uint64_t layer_id = 0;
  uint32_t handle = 0;
  int32_t lane = -1;
  uint64_t epoch = 0;
  int32_t waiting_for = -1;  // world rank
  int64_t since_ns = 0;
};

// Writes the record of one rank. A rank may have several open calls; its record shows the oldest.
class RankTelemetry {
 public:
  explicit RankTelemetry(RankRecord* record) : record_(record) {}

  void Open(CallRecord* call);
  void Update(CallRecord* call, RankState state, int32_t waiting_for);
  // Records that the call has a lane and runs. Other calls of the rank may read `call` meanwhile,
  // but only these methods write it.
  void Granted(CallRecord* call, int32_t lane, uint64_t epoch);
  void Close(CallRecord* call, int64_t rows, int64_t dropped_rows, int64_t now_ns);

 private:
  void Publish();
  void Show();

  std::mutex mutex_;
  RankRecord* record_;
  std::vector<CallRecord*> open_;
  CallRecord last_;  // the last call that ended
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEETING_TELEMETRY_H_
