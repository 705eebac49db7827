// Communicator: one NCCL communicator.
#include "cuda/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace ep_runtime {
namespace nccl {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL's background thread takes tens of microseconds for a call whose peers are connected, and a
// sleep would double that. So waits spin at first.
constexpr std::chrono::microseconds kSpinning(400);
constexpr std::chrono::microseconds kPause(50);
constexpr std::chrono::microseconds kLongestPause(2000);

bool IsFine(int result) { return result == kSuccess || result == kInProgress; }

Status TimedOut(const char* what, const Place& place, int64_t budget_ns) {
  return Error(Code::kDeadlineExceeded, "OpTimeoutError")
      .Says(std::string("NCCL: ") + what + " of rank " + std::to_string(place.world_rank) +
            " was not done within " + std::to_string(static_cast<double>(budget_ns) * 1e-9) + " s")
      .With("rank", place.world_rank)
      .With("op", std::string(what))
      .With("waited_s", static_cast<double>(budget_ns) * 1e-9);
}

}  // namespace

Status Communicator::Gone(const char* what) const {
  return Error(Code::kAborted, "PeerLostError")
      .Says(std::string("NCCL: ") + what + " of rank " + std::to_string(place_.world_rank) +
            " ended because its communicator was aborted")
      .With("rank", place_.world_rank);
}

Status Communicator::Start(int max_channels) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Gone("init");
  Config config;
  if (max_channels > 0) config.max_ctas = max_channels;
  const int result = api_.init_rank(&comm_, place_.ranks, place_.id, place_.rank, &config);
  if (IsFine(result)) return Status();
  return Failed(api_, "init of rank " + std::to_string(place_.world_rank), result, comm_);
}

Status Communicator::Issue(const std::function<int(Comm*)>& issue) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) return Gone("a call");
  const int started = api_.group_start();
  if (!IsFine(started)) return Failed(api_, "ncclGroupStart", started, comm_);
  const int issued = issue(comm_);
  const int ended = api_.group_end();  // also after an error, because it closes the thread's group
  if (!IsFine(issued)) return Failed(api_, "a send or receive", issued, comm_);
  if (!IsFine(ended)) return Failed(api_, "ncclGroupEnd", ended, comm_);
  return Status();
}

Status Communicator::Run(const std::function<int(Comm*)>& issue, int64_t budget_ns,
                         const Alive& alive) {
  EP_RETURN_IF_ERROR(Issue(issue));
  return Wait("a call", budget_ns, alive);
}

Status Communicator::Poll(const char* what, bool* done) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) return Gone(what);
  int error = kSuccess;
  const int result = api_.get_async_error(comm_, &error);
  if (!IsFine(result)) return Failed(api_, what, result, comm_);
  if (!IsFine(error)) return Failed(api_, what, error, comm_);
  *done = result == kSuccess && error == kSuccess;
  return Status();
}

Status Communicator::Wait(const char* what, int64_t budget_ns, const Alive& alive) {
  const Clock::time_point started = Clock::now();
  const Clock::time_point deadline = started + std::chrono::nanoseconds(budget_ns);
  std::chrono::microseconds pause = kPause;
  for (;;) {
    bool done = false;
    EP_RETURN_IF_ERROR(Poll(what, &done));
    if (done) return Status();
    const Clock::time_point now = Clock::now();
    if (now < started + kSpinning) {
      std::this_thread::yield();
      continue;
    }
    EP_RETURN_IF_ERROR(alive());
    if (now > deadline) return TimedOut(what, place_, budget_ns);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

Status Communicator::CheckShape() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) return Gone("init");
  int ranks = -1;
  int rank = -1;
  if (api_.count(comm_, &ranks) == kSuccess && api_.user_rank(comm_, &rank) == kSuccess &&
      ranks == place_.ranks && rank == place_.rank) {
    return Status();
  }
  return Internal("NCCL made rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                  ", wanted " + std::to_string(place_.rank) + " of " +
                  std::to_string(place_.ranks));
}

Status Communicator::AsyncError() {
  bool done = false;
  return gone() ? Status() : Poll("communicator", &done);
}

void Communicator::Finalize(int64_t budget_ns, const Alive& alive) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr || !IsFine(api_.finalize(comm_))) return;
  }
  Wait("finalize", budget_ns, alive);  // ignore its error, because the abort follows
}

void Communicator::Abort() {
  Comm* comm = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) return;
  if (mark_ != nullptr) mark_->Set();
  api_.abort(comm);
}

bool Communicator::gone() {
  std::lock_guard<std::mutex> lock(mutex_);
  return comm_ == nullptr;
}

}  // namespace nccl
}  // namespace ep_runtime
