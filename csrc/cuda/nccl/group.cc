// NcclGroup: runs a group's calls over NCCL.
#include "cuda/nccl/group.h"

#include <utility>

#include "core/base/per_process.h"

namespace ep_runtime {
namespace nccl {
namespace {

// Bound for finalizing. Peers are at the same point of the program when a group closes, and sockets
// drain in milliseconds.
constexpr int64_t kFinalizeNs = 3'000'000'000;

}  // namespace

std::shared_ptr<NcclGroup> NcclGroup::Make(const Api& api, Devices devices,
                                           NcclGroupOptions options) {
  std::shared_ptr<NcclGroup> made(new NcclGroup(std::move(options)));
  // The group outlives its communicators, which do not call the group once they are closed.
  made->communicators_ = std::make_unique<Communicators>(
      api, std::move(devices), [group = made.get()] { return group->Alive(); },
      made->options_.purpose, made->options_.places);
  return made;
}

Status NcclGroup::Init(int64_t budget_ns) {
  const Status status = communicators_->Init(budget_ns);
  const Status why = Alive();  // the reason, which is clearer than "communicators were aborted"
  return status.ok() || why.ok() ? status : why;
}

std::string NcclGroup::version() const { return VersionText(communicators_->version()); }

Status NcclGroup::Alive() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

Communicator* NcclGroup::OfDevice(int device) const {
  for (const Place& place : options_.places) {
    if (place.device == device) return communicators_->OfRank(place.world_rank);
  }
  return nullptr;
}

Status NcclGroup::Decide(uint64_t run) {
  return starts_.Decide(run, [this] {
    const Status over = Alive();
    return over.ok() ? communicators_->Failure() : over;
  });
}

void NcclGroup::RankLeft(int64_t world_rank, const Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  left_.emplace(world_rank, why);
}

Status NcclGroup::Left(const Communicator& communicator, const Peers& peers) const {
  const int64_t first = communicator.place().world_rank - communicator.place().rank + peers.first;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t peer = 0; peer < peers.count && !left_.empty(); ++peer) {
    auto found = left_.find(first + peer * peers.stride);
    if (found != left_.end()) return found->second;
  }
  return Status();
}

Status NcclGroup::Run(Communicator& communicator, const Peers& peers,
                      const std::function<int(Comm*)>& issue) {
  const Status status = Issue(communicator, peers, issue);
  return status.ok() ? Await(communicator) : status;
}

Status NcclGroup::Issue(Communicator& communicator, const Peers& peers,
                        const std::function<int(Comm*)>& issue) {
  Status status = communicators_->Failure();
  if (status.ok()) status = Left(communicator, peers);
  if (status.ok()) status = communicators_->Explained(communicator.Issue(issue));
  return Ended(status);
}

Status NcclGroup::Await(Communicator& communicator) {
  return Ended(communicators_->Explained(
      communicator.Wait("a call", options_.op_timeout_ns, communicators_->alive())));
}

Status NcclGroup::Ended(const Status& status) {
  if (status.ok()) return status;
  // Report why the generation is over, which is clearer than that the communicator is gone.
  const Status why = Alive();
  communicators_->Fail(why.ok() ? status : why);
  // Until the abort, NCCL's thread may still put this call's kernel on the stream. Abort first, so
  // that the caller's fill runs last.
  communicators_->Abort();
  return communicators_->Failure();
}

void NcclGroup::Abort(const Status& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_.ok()) over_ = why;
  }
  communicators_->Fail(why);
  communicators_->Abort();
}

void NcclGroup::Close(int64_t timeout_ns) {
  const bool quiet = calls_.Close(timeout_ns);
  communicators_->Close(quiet ? kFinalizeNs : 0);
}

Status NcclGroup::ClosedError(const std::string& layer) const {
  return ClosedLayer(layer, options_.name, options_.generation);
}

std::string NcclGroup::TakeError() {
  const Status failure = communicators_->Failure();
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure.ok() || std::exchange(told_, true)) return std::string();
  return failure.text();
}

NcclRegistry& ThisProcessGroups() { return OfThisProcess<NcclRegistry>(); }

}  // namespace nccl
}  // namespace ep_runtime
