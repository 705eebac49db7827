#include "core/meeting/telemetry.h"

#include <algorithm>

namespace ep_runtime {

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

void RankTelemetry::Close(CallRecord* call, int64_t rows, int64_t dropped_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.erase(std::remove(open_.begin(), open_.end(), call), open_.end());
  record_->calls += 1;
  record_->rows += rows;
  record_->dropped_rows += dropped_rows;
  record_->progress_ns = NowNs();
  Publish();
  if (!open_.empty()) return;
  // The last call stays visible, as what the rank did last.
  record_->op = static_cast<uint32_t>(call->op);
  record_->layer_id = call->layer_id;
  record_->handle = call->handle;
  record_->epoch = call->epoch;
}

void RankTelemetry::Publish() {
  static const CallRecord kIdle = [] {
    CallRecord idle;
    idle.state = RankState::kIdle;
    return idle;
  }();
  const CallRecord& shown = open_.empty() ? kIdle : *open_.front();
  const uint32_t sequence = record_->sequence.load(std::memory_order_relaxed);
  record_->sequence.store(sequence + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_release);
  record_->state = static_cast<uint32_t>(shown.state);
  record_->op = static_cast<uint32_t>(shown.op);
  record_->waiting_for = shown.waiting_for;
  record_->layer_id = shown.layer_id;
  record_->handle = shown.handle;
  record_->lane = shown.lane;
  record_->epoch = shown.epoch;
  record_->since_ns = static_cast<uint64_t>(shown.since_ns);
  record_->open_calls = static_cast<uint32_t>(open_.size());
  record_->sequence.store(sequence + 2, std::memory_order_release);
}

}  // namespace ep_runtime
