// FailureRing: publishes and reads failed runs on the board.
#include "core/meeting/failure_ring.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ep_runtime {
namespace {

// Cuts `text` to `bytes` if it is longer. Then its JSON fields are dropped, so that readers can
// still parse the text.
std::string Fitting(const std::string& text, size_t bytes) {
  static const std::string kNoFields = " {}";
  if (text.size() <= bytes) return text;
  return text.substr(0, std::min(bytes - kNoFields.size(), text.find(" {"))) + kNoFields;
}

}  // namespace

void FailureRing::Bind(BoardHeader* header, FailureRecord* records) {
  claimed_ = &header->failures;
  records_ = records;
  seen_.store(claimed_->load(std::memory_order_acquire), std::memory_order_relaxed);
}

void FailureRing::Publish(const Launches::Reached& reached, const Status& error) {
  const uint64_t number = claimed_->fetch_add(1, std::memory_order_acq_rel);
  FailureRecord& record = records_[number % kFailureRecords];
  const std::string text = Fitting(error.text(), sizeof(record.text));
  record.ticket.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.site_name = reached.site;
  record.launch = reached.launch;
  record.code = static_cast<uint32_t>(error.code());
  record.bytes = static_cast<uint32_t>(text.size());
  std::memcpy(record.text, text.data(), text.size());
  record.ticket.store(number + 1, std::memory_order_release);
}

void FailureRing::Import(FailedRuns* runs) {
  const uint64_t claimed = claimed_->load(std::memory_order_acquire);
  if (seen_.load(std::memory_order_acquire) == claimed) return;
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t next = seen_.load(std::memory_order_relaxed);
  for (; next < claimed; ++next) {
    const FailureRecord& record = records_[next % kFailureRecords];
    const uint64_t ticket = record.ticket.load(std::memory_order_acquire);
    if (ticket < next + 1) break;  // a writer has claimed this record but not finished it
    if (ticket > next + 1) continue;
    const Launches::Reached reached{record.site_name, record.launch};
    const auto code = static_cast<Code>(record.code);
    const std::string text(record.text, std::min<size_t>(record.bytes, sizeof(record.text)));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (record.ticket.load(std::memory_order_relaxed) != ticket) continue;  // overwritten
    runs->AddElsewhere(reached, Status(code, text));
  }
  seen_.store(next, std::memory_order_release);
}

}  // namespace ep_runtime
