// RankTelemetry: a rank's record on the board.
#include "core/meeting/telemetry.h"

#include <algorithm>

namespace ep_runtime {
namespace {

// Marks a record as being written, so that readers wait.
class Writing {
 public:
  explicit Writing(RankRecord* record)
      : record_(record), sequence_(record->sequence.load(std::memory_order_relaxed)) {
    record_->sequence.store(sequence_ + 1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);
  }
  ~Writing() { record_->sequence.store(sequence_ + 2, std::memory_order_release); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

 private:
  RankRecord* record_;
  uint32_t sequence_;
};

}  // namespace

void RankTelemetry::Open(CallRecord* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call->since_ns = NowNs();
  open_.push_back(call);
  Publish();
}

void RankTelemetry::Update(CallRecord* call, RankState state, int32_t waiting_for) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call->state == state && call->waiting_for == waiting_for) return;
  call->state = state;
  call->waiting_for = waiting_for;
  call->since_ns = NowNs();
  Publish();
}

void RankTelemetry::Granted(CallRecord* call, int32_t lane, uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mutex_);
  call->lane = lane;
  call->epoch = epoch;
  call->state = RankState::kRunning;
  call->waiting_for = -1;
  call->since_ns = NowNs();
  Publish();
}

void RankTelemetry::Close(CallRecord* call, int64_t rows, int64_t dropped_rows, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.erase(std::remove(open_.begin(), open_.end(), call), open_.end());
  // While no call is open, the record shows the last call.
  last_ = CallRecord();
  last_.state = RankState::kIdle;
  last_.op = call->op;
  last_.layer_id = call->layer_id;
  last_.handle = call->handle;
  last_.epoch = call->epoch;
  const Writing writing(record_);
  record_->calls += 1;
  record_->rows += rows;
  record_->dropped_rows += dropped_rows;
  record_->progress_ns = static_cast<uint64_t>(now_ns);
  Show();
}

void RankTelemetry::Publish() {
  const Writing writing(record_);
  Show();
}

void RankTelemetry::Show() {
  const CallRecord& shown = open_.empty() ? last_ : *open_.front();
  record_->state = static_cast<uint32_t>(shown.state);
  record_->op = static_cast<uint32_t>(shown.op);
  record_->waiting_for = shown.waiting_for;
  record_->layer_id = shown.layer_id;
  record_->handle = shown.handle;
  record_->lane = shown.lane;
  record_->epoch = shown.epoch;
  record_->since_ns = static_cast<uint64_t>(shown.since_ns);
  record_->open_calls = static_cast<uint32_t>(open_.size());
}

}  // namespace ep_runtime
