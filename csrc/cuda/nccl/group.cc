#include "cuda/nccl/group.h"

#include <chrono>
#include <utility>

#include "core/groups/stale.h"

namespace ep_runtime {
namespace nccl {
namespace {

// Peers are at the same point of the program when a group closes; sockets drain in milliseconds.
constexpr int64_t kFinalizeNs = 3'000'000'000;

}  // namespace

std::shared_ptr<NcclGroup> NcclGroup::Make(const Api& api, Devices devices,
                                           NcclGroupOptions options) {
  std::shared_ptr<NcclGroup> made(new NcclGroup(std::move(options)));
  // The group outlives its communicators, which ask it no more once they are closed.
  made->communicators_ = std::make_unique<Communicators>(
      api, std::move(devices), [group = made.get()] { return group->Alive(); },
      made->options_.purpose, made->options_.places);
  return made;
}

Status NcclGroup::Init(int64_t budget_ns) {
  const Status status = communicators_->Init(budget_ns);
  const Status why = Alive();  // says more than that communicators were aborted
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
  Status now = Alive();
  if (now.ok()) now = communicators_->Failure();
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = runs_.emplace(run, now);
  if (!is_new) return found->second;
  run_order_.push_back(run);
  if (run_order_.size() > kMaxRuns) {
    runs_.erase(run_order_.front());
    run_order_.pop_front();
  }
  return now;
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
  Status status = communicators_->Failure();
  if (status.ok()) status = Left(communicator, peers);
  if (status.ok()) {
    status = communicators_->Explained(
        communicator.Run(issue, options_.op_timeout_ns, communicators_->alive()));
  }
  if (status.ok()) return status;
  // Why the communicator went away says more than that it is gone.
  const Status why = Alive();
  communicators_->Fail(why.ok() ? status : why);
  // NCCL's own thread may still put this call's kernel on the stream. Until it cannot any more,
  // nothing that the caller puts there comes last.
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

bool NcclGroup::BeginCall() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  ++running_calls_;
  return true;
}

void NcclGroup::EndCall() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--running_calls_ == 0) no_calls_.notify_all();
}

void NcclGroup::Close(int64_t timeout_ns) {
  bool quiet = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    quiet = no_calls_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                               [&] { return running_calls_ == 0; });
  }
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

int64_t NcclRegistry::Add(std::shared_ptr<NcclGroup> group) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.emplace(++last_id_, std::move(group));
  return last_id_;
}

std::shared_ptr<NcclGroup> NcclRegistry::Find(int64_t id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

Status NcclRegistry::AddLayers(int64_t group_id, const std::vector<Layer>& layers) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = groups_.find(group_id);
  if (found == groups_.end()) {
    return Stale("no open group has the number " + std::to_string(group_id));
  }
  const NcclGroupOptions& options = found->second->options();
  for (const Layer& layer : layers) {
    layers_[layer.id] =
        Registered{layer, group_id, found->second, options.name, options.generation};
  }
  return Status();
}

std::shared_ptr<NcclGroup> NcclRegistry::Remove(int64_t group_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = groups_.find(group_id);
  if (found == groups_.end()) return nullptr;
  std::shared_ptr<NcclGroup> group = std::move(found->second);
  groups_.erase(found);
  for (auto& [id, registered] : layers_) {
    if (registered.group_id == group_id) registered.group = nullptr;
  }
  return group;
}

Status NcclRegistry::Resolve(uint64_t layer_id, uint64_t fingerprint, std::string* name,
                             std::shared_ptr<NcclGroup>* group) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = layers_.find(layer_id);
  if (found == layers_.end()) {
    return UnknownLayer(layer_id);
  }
  const Registered& registered = found->second;
  *name = registered.layer.name;
  if (registered.group == nullptr) {
    return ClosedLayer(registered.layer.name, registered.group_name, registered.generation);
  }
  if (registered.layer.fingerprint != fingerprint) {
    return OtherLayer(registered.layer.name, registered.group_name, registered.generation,
                      fingerprint, registered.layer.fingerprint);
  }
  *group = registered.group;
  return Status();
}

NcclRegistry& ThisProcessGroups() {
  static auto* const groups = new NcclRegistry;
  return *groups;
}

}  // namespace nccl
}  // namespace ep_runtime
