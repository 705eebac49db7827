// Communicators: joins, watches and aborts a group's communicators.
#include "cuda/nccl/communicators.h"

#include <utility>

namespace ep_runtime {
namespace nccl {
namespace {

// If a peer dies, its group is poisoned within milliseconds. The survivors' kernels end at most
// this much later.
constexpr std::chrono::milliseconds kWatchEvery(20);
// Communicators that carry no rows are checked less often, because no call waits for a failure.
constexpr std::chrono::milliseconds kWatchIdleEvery(500);
constexpr std::chrono::seconds kAbortBound(10);
// Threads of Init notice the deadline themselves. This bounds a thread that hangs in NCCL.
constexpr std::chrono::seconds kInitGrace(2);
// How long to wait for the daemons' report of the lost process. All ranks have it within two
// seconds, mostly within a tenth of a second.
constexpr std::chrono::milliseconds kToldWithin(1500);
constexpr std::chrono::milliseconds kAskEvery(5);

}  // namespace

Communicators::Communicators(const Api& api, Devices devices, Alive alive, Purpose purpose,
                             const std::vector<Place>& places)
    : api_(api), devices_(std::move(devices)), purpose_(purpose), alive_([asked = asked_] {
        std::lock_guard<std::mutex> lock(asked->mutex);
        return asked->alive ? asked->alive() : Stale("the communicators are closed");
      }) {
  asked_->alive = std::move(alive);
  for (const Place& place : places) all_.push_back(std::make_shared<Communicator>(api_, place));
}

// Runs `work` for each communicator on a separate thread, with its device current. Returns false if
// some threads have not ended within `bound`: these continue detached.
bool Communicators::OnEach(std::function<Status(Communicator&)> work,
                           std::chrono::nanoseconds bound, Status* first_error) {
  const auto shared = std::make_shared<Shared>();
  shared->busy = static_cast<int>(all_.size());
  for (const std::shared_ptr<Communicator>& communicator : all_) {
    std::thread([shared, communicator, work, set = devices_.set] {
      Status status = set(communicator->place().device);
      if (status.ok()) status = work(*communicator);
      std::lock_guard<std::mutex> lock(shared->mutex);
      --shared->busy;
      if (shared->error.ok()) shared->error = status;
      shared->changed.notify_all();
    }).detach();
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  const bool ended = shared->changed.wait_for(lock, bound, [&] { return shared->busy == 0; });
  if (first_error != nullptr) *first_error = shared->error;
  return ended;
}

Status Communicators::Init(int64_t budget_ns) {
  Status error;
  // The first failure ends the other waits, because peers of the failed communicator would wait in
  // vain.
  const auto shared_failure = std::make_shared<std::pair<std::mutex, Status>>();
  const Alive alive = [shared_failure, outer = alive_] {
    {
      std::lock_guard<std::mutex> lock(shared_failure->first);
      if (!shared_failure->second.ok()) return shared_failure->second;
    }
    return outer();
  };
  const auto init = [shared_failure, alive, devices = devices_, purpose = purpose_,
                     budget_ns](Communicator& communicator) {
    std::unique_ptr<AbortMark> mark;
    Status status = purpose.carries_rows ? devices.make_mark(&mark) : Status();
    communicator.GiveMark(std::move(mark));
    if (status.ok()) status = communicator.Start(purpose.max_channels);
    if (status.ok()) status = communicator.Wait("init", budget_ns, alive);
    if (status.ok()) status = communicator.CheckShape();
    if (status.ok() && purpose.carries_rows) {
      status = devices.try_out(communicator, budget_ns, alive);
    }
    if (!status.ok()) {
      std::lock_guard<std::mutex> lock(shared_failure->first);
      if (shared_failure->second.ok()) shared_failure->second = status;
    }
    return status;
  };
  if (!OnEach(init, std::chrono::nanoseconds(budget_ns) + kInitGrace, &error) && error.ok()) {
    error = Internal(
        "NCCL did not give back a thread that makes a communicator; is "
        "NCCL_COMM_BLOCKING set?");
  }
  if (error.ok()) {
    watcher_ = std::thread([this] { Watch(); });
    return Status();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = error;
  }
  Abort();
  return error;
}

Status Communicators::TrySum(int64_t budget_ns) {
  Status error = Failure();
  if (!error.ok()) return error;
  const auto sum = [try_sum = devices_.try_sum, alive = alive_,
                    budget_ns](Communicator& communicator) {
    return try_sum(communicator, budget_ns, alive);
  };
  if (!OnEach(sum, std::chrono::nanoseconds(budget_ns) + kInitGrace, &error) && error.ok()) {
    error = Internal("NCCL did not give back a thread that sums over a communicator");
  }
  if (error.ok()) return error;
  Fail(error);
  Abort();
  return error;
}

// Until Close, checks the generation and NCCL's own errors, and aborts all communicators at the
// first error.
void Communicators::Watch() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      stop_or_failed_.wait_for(lock, purpose_.carries_rows ? kWatchEvery : kWatchIdleEvery,
                               [&] { return stopping_ || !failure_.ok(); });
      if (stopping_) return;
    }
    Status status = Failure();
    if (status.ok()) status = alive_();
    for (const auto& communicator : all_) {
      if (status.ok()) status = communicator->AsyncError();
    }
    if (status.ok()) continue;
    Fail(Explained(status));
    Abort();
    return;
  }
}

Communicator* Communicators::OfRank(int64_t world_rank) const {
  for (const auto& communicator : all_) {
    if (communicator->place().world_rank == world_rank) return communicator.get();
  }
  return nullptr;
}

Status Communicators::Failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Communicators::AwaitFailure(int64_t timeout_ns, Status* failure) {
  std::unique_lock<std::mutex> lock(mutex_);
  stop_or_failed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                           [&] { return stopping_ || !failure_.ok(); });
  *failure = failure_;
  return !stopping_;
}

Status Communicators::Explained(const Status& error) {
  if (error.ok()) return error;
  const auto until = std::chrono::steady_clock::now() + kToldWithin;
  for (;;) {
    const Status why = alive_();
    if (!why.ok()) return why;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
    const bool late = std::chrono::steady_clock::now() > until;
    if (error.code() != Code::kAborted || stopping_ || late) return error;
    stop_or_failed_.wait_for(lock, kAskEvery);
  }
}

void Communicators::Fail(const Status& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.ok()) failure_ = error;
  stop_or_failed_.notify_all();
}

void Communicators::Abort() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (std::exchange(abort_begun_, true)) {  // a second caller waits for the first to finish
      abort_ended_.wait_for(lock, kAbortBound, [&] { return abort_over_; });
      return;
    }
  }
  OnEach(
      [](Communicator& communicator) {
        communicator.Abort();
        return Status();
      },
      kAbortBound, nullptr);
  std::lock_guard<std::mutex> lock(mutex_);
  abort_over_ = true;
  abort_ended_.notify_all();
}

void Communicators::StopWatching() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    stop_or_failed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

void Communicators::Close(int64_t finalize_ns) {
  StopWatching();
  if (finalize_ns > 0 && Failure().ok() && alive_().ok()) {
    OnEach(
        [finalize_ns, alive = alive_](Communicator& communicator) {
          communicator.Finalize(finalize_ns, alive);
          return Status();
        },
        std::chrono::nanoseconds(finalize_ns) + kInitGrace, nullptr);
  }
  Abort();
  std::lock_guard<std::mutex> lock(asked_->mutex);
  asked_->alive = nullptr;
}

}  // namespace nccl
}  // namespace ep_runtime
