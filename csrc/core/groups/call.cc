// Call: one rank's part of a call on CPU.
#include "core/groups/call.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ep_runtime {

Call::Call(CallContext context)
    : context_(std::move(context)),
      ep_rank_(context_.world_rank % context_.group->sizes().ep_size),
      ep_size_(context_.group->sizes().ep_size),
      first_rank_(context_.world_rank - ep_rank_),
      place_(context_.group->domain_of(context_.world_rank)),
      telemetry_(context_.group->telemetry(context_.world_rank)),
      tally_(context_.group->tally(context_.world_rank)) {
  record_.op = context_.op;
  record_.layer_id = context_.layer.id;
  record_.handle = context_.handle;
  telemetry_.Open(&record_);
  started_ns_ = record_.since_ns;
}

Call::~Call() {
  const int64_t now_ns = NowNs();
  WriteHandle(/*running=*/false, now_ns);
  if (ran_) tally_.AddCall(context_.op, index(), now_ns - started_ns_, wait_ns_);
  telemetry_.Close(&record_, rows_, dropped_rows_, now_ns);
}

std::vector<int64_t> Call::Ring() const {
  std::vector<int64_t> ring(ep_size_);
  for (int64_t i = 0; i < ep_size_; ++i) ring[i] = (ep_rank_ + i) % ep_size_;
  return ring;
}

Status Call::TimedOut(int64_t waited_ns, int64_t waiting_for) const {
  const double waited_s = static_cast<double>(waited_ns) * 1e-9;
  const std::string peer = waiting_for < 0 ? "a lane" : "rank " + std::to_string(waiting_for);
  return Error(Code::kDeadlineExceeded, "OpTimeoutError")
      .Says("rank " + std::to_string(context_.world_rank) + " waited " + std::to_string(waited_s) +
            " s in " + OpName(context_.op) + " of layer " + context_.layer.name + " for " + peer)
      .With("rank", waiting_for)
      .With("layer", context_.layer.name)
      .With("op", std::string(OpName(context_.op)))
      .With("epoch", static_cast<int64_t>(record_.epoch))
      .With("waited_s", waited_s);
}

// Returns the error that ends a wait early, if there is one. Closing a group ends only incomplete
// meetings: a call that all ranks have joined finishes.
Status Call::Look(int64_t started_ns, bool gathering, int64_t waiting_for) const {
  EP_RETURN_IF_ERROR(group().RunFailure(context_.run));
  EP_RETURN_IF_ERROR(
      group().Alive(context_.layer.name, context_.op, static_cast<int64_t>(record_.epoch)));
  if (gathering && group().closed()) return group().ClosedError(context_.layer.name);
  const int64_t waited_ns = NowNs() - started_ns;
  if (waited_ns < group().options().op_timeout_ns) return Status();
  return TimedOut(waited_ns, waiting_for);
}

// Returns how long a wait may sleep: at most until its budget ends, and short enough to notice
// poison or a failed run.
int64_t Call::SliceNs(int64_t started_ns) const {
  const int64_t left_ns = started_ns + group().options().op_timeout_ns - NowNs();
  return std::clamp(left_ns, int64_t{100'000}, kWaitSliceNs);
}

// While ranks of several processes gather, looks for ranks that will never join. A rank
// that is only late causes no error. If the wait reaches its budget, the error names the calls that
// do not match.
Status Call::LookForAbsent(MeetingPlace& place, const MeetingSlot& slot, int64_t first_rank,
                           int64_t started_ns) const {
  if (!group().several_processes()) return Status();
  for (int rank = 0; rank < place.ranks(); ++rank) {
    // Check HasLeft before Joined, because a rank joins its last call before its process leaves.
    if (group().HasLeft(first_rank + rank) && !place.Joined(slot, rank)) {
      return group().LeftError(context_.layer.name, context_.op, first_rank + rank);
    }
  }
  const int64_t waited_ns = NowNs() - started_ns;
  if (waited_ns < MeetingPlace::kMisfitNs) return Status();
  const MeetingPlace::Misfit misfit = place.FindMisfit(slot);
  const bool over = waited_ns >= group().options().op_timeout_ns;
  if (misfit.text.empty() || !(misfit.certain || over)) return Status();
  const Status error =
      Error(Code::kFailedPrecondition, "SpecMismatchError")
          .Says(std::string(OpName(context_.op)) + " of layer " + context_.layer.name + " handle " +
                std::to_string(context_.handle) +
                ": ranks wait for each other in different calls: " + misfit.text +
                "; the processes compiled or ran different programs. Compile the same programs in "
                "the same order everywhere, use different handles for calls that do not depend on "
                "each other, or restart all processes together")
          .With("object", std::string("call"))
          .With("rank", context_.world_rank)
          .With("layer", context_.layer.name)
          .With("op", std::string(OpName(context_.op)))
          .With("calls", misfit.text);
  // Publish under the other meeting's name for the run, because its ranks do not know this run's
  // name.
  group().FailElsewhere(misfit.other, error);
  return error;
}

Status Call::FailedOnPeer(int64_t rank) const {
  return Error(Code::kAborted, "PeerLostError")
      .Says(std::string(OpName(context_.op)) + " of layer " + context_.layer.name +
            " failed on a peer")
      .With("rank", rank)
      .With("layer", context_.layer.name)
      .With("op", std::string(OpName(context_.op)))
      .With("epoch", static_cast<int64_t>(record_.epoch));
}

// Records the error for the other calls of this run, before any of them wakes up and checks for
// errors.
Status Call::Failed(Status error) {
  group().FailRun(context_.run, error);
  return error;
}

Status Call::Meet(MeetingPlace& place, int rank, int64_t first_rank, const Verdict& verdict,
                  MeetingSlot** out) {
  const CallTag tag{context_.key, context_.run,      context_.site,
                    context_.op,  context_.layer.id, context_.handle};
  const int64_t started_ns = NowNs();
  // A run that failed on another device must not open meetings that nobody else will join.
  EP_RETURN_IF_ERROR(Look(started_ns, /*gathering=*/true, -1));
  MeetingSlot* slot = nullptr;
  Status joined = place.Join(tag, rank, verdict, &slot);
  if (!joined.ok()) {
    EP_RETURN_IF_ERROR(Look(started_ns, /*gathering=*/true, -1));  // if the group is poisoned, that
                                                                   // error is clearer
    return joined;
  }
  for (;;) {
    const uint32_t state = slot->state.load(std::memory_order_acquire);
    if (state == kSlotGranted) break;
    const int missing = place.FirstMissing(*slot);
    const int64_t waiting_for = missing < 0 ? -1 : first_rank + missing;
    Status error;
    if (state == kSlotGathering) error = LookForAbsent(place, *slot, first_rank, started_ns);
    if (error.ok()) error = Look(started_ns, state == kSlotGathering, waiting_for);
    if (error.ok() && state == kSlotFailed) error = FailedOnPeer(waiting_for);
    if (!error.ok()) {
      error = Failed(std::move(error));
      place.Leave(slot, /*failed=*/true);
      return error;
    }
    telemetry_.Update(&record_, RankState::kMeeting, static_cast<int32_t>(waiting_for));
    FutexWait(&slot->state, state, SliceNs(started_ns));
  }
  *out = slot;
  return Status();
}

// Tallies the peers that joined the call after this rank, once all ranks have joined. A rank waits
// until the last peer joins, so the whole wait is charged to that peer.
void Call::TallyArrivals() {
  int64_t last = -1;
  int64_t longest_ns = 0;
  for (int64_t rank = 0; rank < ep_size_; ++rank) {
    const Word64& joined = place_.joined_ns(record_.lane, static_cast<int>(rank));
    const int64_t after_ns =
        static_cast<int64_t>(joined.load(std::memory_order_relaxed)) - started_ns_;
    if (after_ns <= 0) continue;
    tally_.AddArrival(context_.op, rank, after_ns);
    if (after_ns > longest_ns) {
      longest_ns = after_ns;
      last = rank;
    }
  }
  if (last < 0) return;
  tally_.AddWait(context_.op, last, longest_ns);
  wait_ns_ += longest_ns;
}

Status Call::Run(const std::function<Status(Call&)>& body) {
  MeetingSlot* slot = nullptr;
  Status status = Meet(place_, static_cast<int>(ep_rank_), first_rank_, Verdict(), &slot);
  if (!status.ok()) return Failed(std::move(status));
  telemetry_.Granted(&record_, slot->lane, slot->epoch);
  place_.joined_ns(record_.lane, static_cast<int>(ep_rank_))
      .store(static_cast<uint64_t>(started_ns_), std::memory_order_relaxed);
  WriteHandle(/*running=*/true, record_.since_ns);
  status = body(*this);
  if (!status.ok()) {
    status = Failed(std::move(status));
    place_.lane(record_.lane).failed.store(1, std::memory_order_release);
    for (int rank = 0; rank < place_.ranks(); ++rank) {
      FutexWakeAll(&place_.phase(record_.lane, rank));
    }
  } else {
    TallyArrivals();
    ran_ = true;
  }
  place_.Leave(slot, !status.ok());
  return status;
}

Status Call::GatherVerdict(int64_t demand, int64_t capacity) {
  Verdict mine;
  if (demand > capacity) mine = {static_cast<int32_t>(context_.world_rank), demand, capacity};
  MeetingPlace* world = group().world();
  if (world == nullptr) {
    return Failed(Internal("ranks of other nodes cannot exchange their demand on the board"));
  }
  MeetingSlot* slot = nullptr;
  Status status = Meet(*world, static_cast<int>(context_.world_rank), 0, mine, &slot);
  if (!status.ok()) return Failed(std::move(status));
  const Verdict all{slot->verdict_rank, slot->verdict_demand, slot->verdict_capacity};
  world->Leave(slot, /*failed=*/false);
  if (all.rank < 0) return Status();
  return Failed(OverflowError(context_.layer.name, all.rank, all.demand, all.capacity));
}

void Call::Signal(uint32_t phase) {
  Word& word = place_.phase(record_.lane, static_cast<int>(ep_rank_));
  word.store(phase, std::memory_order_release);
  FutexWakeAll(&word);
}

Status Call::Await(int64_t source, uint32_t phase) {
  Word& word = place_.phase(record_.lane, static_cast<int>(source));
  Word& failed = place_.lane(record_.lane).failed;
  const int64_t started_ns = NowNs();
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (seen >= phase) break;
    // Read `failed` before calling Look, because a peer publishes its error before it sets
    // `failed`.
    const bool peer_failed = failed.load(std::memory_order_acquire) != 0;
    EP_RETURN_IF_ERROR(Look(started_ns, /*gathering=*/false, first_rank_ + source));
    if (peer_failed) return FailedOnPeer(first_rank_ + source);
    telemetry_.Update(&record_, RankState::kWaiting, static_cast<int32_t>(first_rank_ + source));
    FutexWait(&word, seen, SliceNs(started_ns));
  }
  if (record_.state != RankState::kRunning) {
    telemetry_.Update(&record_, RankState::kRunning, -1);
    const int64_t waited_ns = record_.since_ns - started_ns;
    tally_.AddWait(context_.op, source, waited_ns);
    wait_ns_ += waited_ns;
  }
  return Status();
}

Status Call::NextReady(std::vector<int64_t>* pending, uint32_t phase, int64_t* source) {
  size_t chosen = 0;
  for (size_t i = 0; i < pending->size(); ++i) {
    const Word& word = place_.phase(record_.lane, static_cast<int>((*pending)[i]));
    if (word.load(std::memory_order_acquire) >= phase) {
      chosen = i;
      break;
    }
  }
  *source = (*pending)[chosen];
  pending->erase(pending->begin() + static_cast<int64_t>(chosen));
  return Await(*source, phase);
}

void Call::WriteHandle(bool running, int64_t now_ns) {
  const uint32_t index = this->index();
  if (index >= kMaxHandles || record_.lane < 0) return;
  HandleRecord& handle = group().handle_record(index);
  HandleState state = HandleState::kBusy;
  if (!running) {
    const bool ends = context_.op == OpCode::kCombine || context_.op == OpCode::kDispatchBwd;
    state = ends ? HandleState::kIdle : HandleState::kOpen;
    handle.rows.fetch_add(rows_, std::memory_order_relaxed);
    handle.dropped_rows.fetch_add(dropped_rows_, std::memory_order_relaxed);
    if (context_.world_rank == group().first_here())
      handle.calls.fetch_add(1, std::memory_order_relaxed);
  }
  handle.state.store(static_cast<uint32_t>(state), std::memory_order_relaxed);
  handle.last_op.store(static_cast<uint32_t>(context_.op), std::memory_order_relaxed);
  handle.lane.store(record_.lane, std::memory_order_relaxed);
  handle.epoch.store(record_.epoch, std::memory_order_relaxed);
  handle.updated_ns.store(static_cast<uint64_t>(now_ns), std::memory_order_relaxed);
}

}  // namespace ep_runtime
