// Group: opens and closes a group, and builds its errors.
#include "core/groups/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/groups/stale.h"
#include "core/runs/runs.h"

namespace ep_runtime {
namespace {

Status CheckSizes(const GroupSizes& sizes) {
  const bool sane = sizes.ep_size > 0 && sizes.world_size > 0 &&
                    sizes.world_size % sizes.ep_size == 0 && sizes.num_experts > 0 &&
                    sizes.num_experts % sizes.ep_size == 0 && sizes.lanes > 0 &&
                    sizes.world_size <= kMaxWorldRanks;
  if (sane) return Status();
  return InvalidArgument(
      "a group needs ep_size dividing world_size and num_experts, at least one lane and at most " +
      std::to_string(kMaxWorldRanks) + " ranks; got ep_size=" + std::to_string(sizes.ep_size) +
      " world_size=" + std::to_string(sizes.world_size) + " num_experts=" +
      std::to_string(sizes.num_experts) + " lanes=" + std::to_string(sizes.lanes));
}

}  // namespace

Status Group::Open(GroupOptions options, int board_fd, const std::vector<int>& window_fds,
                   std::shared_ptr<Group>* out) {
  EP_RETURN_IF_ERROR(CheckSizes(options.sizes));
  const int64_t on_host = options.window_bytes == 0 ? options.sizes.world_size : 0;
  if (static_cast<int64_t>(window_fds.size()) != on_host) {
    return InvalidArgument("window_fds must hold one fd per world rank, " +
                           std::to_string(on_host) + ", got " + std::to_string(window_fds.size()));
  }
  std::shared_ptr<Group> group(new Group(std::move(options)));
  EP_RETURN_IF_ERROR(group->CheckLocalRanks());
  EP_RETURN_IF_ERROR(group->CheckHere(window_fds));
  Mapping header;
  EP_RETURN_IF_ERROR(Mapping::Map(board_fd, sizeof(BoardHeader), "board", &header));
  const auto& board = *reinterpret_cast<const BoardHeader*>(header.data());
  EP_RETURN_IF_ERROR(group->CheckBoard(board));
  EP_RETURN_IF_ERROR(Mapping::Map(board_fd, board.board_bytes, "board", &group->board_));
  group->header_ = reinterpret_cast<BoardHeader*>(group->board_.data());
  EP_RETURN_IF_ERROR(group->ReadSeats());
  group->windows_.resize(on_host);
  for (int64_t rank = 0; rank < on_host; ++rank) {
    if (window_fds[rank] < 0) continue;
    EP_RETURN_IF_ERROR(
        Mapping::Map(window_fds[rank], group->window_bytes(), "window", &group->windows_[rank]));
  }
  group->BindBoard();
  *out = std::move(group);
  return Status();
}

Status Group::CheckLocalRanks() {
  local_.assign(sizes().world_size, false);
  for (int64_t rank : options_.local_ranks) {
    if (rank < 0 || rank >= sizes().world_size || local_[rank]) {
      return InvalidArgument("local_ranks must be distinct and in [0, " +
                             std::to_string(sizes().world_size) + "), got " + std::to_string(rank))
          .With("argument", std::string("local_ranks"));
    }
    local_[rank] = true;
    ++num_local_;
  }
  return Status();
}

// Checks that the EP groups of local ranks have the windows of all their ranks on this node.
Status Group::CheckHere(const std::vector<int>& window_fds) {
  if (window_fds.empty()) return Status();
  for (int64_t rank : options_.local_ranks) {
    const int64_t first = rank - rank % sizes().ep_size;
    for (int64_t peer = first; peer < first + sizes().ep_size; ++peer) {
      if (window_fds[peer] >= 0) continue;
      return InvalidArgument("window_fds has none of rank " + std::to_string(peer) +
                             ", which shares windows with rank " + std::to_string(rank))
          .With("argument", std::string("window_fds"));
    }
  }
  return Status();
}

int64_t Group::window_bytes() const {
  return options_.window_bytes > 0 ? options_.window_bytes : WindowBytes(sizes());
}

Status Group::CheckBoard(const BoardHeader& header) const {
  const GroupSizes& sizes = options_.sizes;
  if (header.magic != kBoardMagic || header.version != kBoardVersion) {
    return VersionSkew("the board has version " + std::to_string(header.version) +
                       ", this library reads " + std::to_string(kBoardVersion))
        .With("client", int64_t{kBoardVersion})
        .With("daemon", int64_t{header.version});
  }
  if (header.generation != options_.generation) {
    return Stale("group " + options_.name + ": the board has generation " +
                 std::to_string(header.generation) + ", asked for " +
                 std::to_string(options_.generation))
        .With("group", options_.name)
        .With("generation", static_cast<int64_t>(options_.generation));
  }
  if (header.world_size != sizes.world_size || header.ep_size != sizes.ep_size ||
      header.lanes != sizes.lanes || header.window_bytes != static_cast<uint64_t>(window_bytes()) ||
      header.max_handles != kMaxHandles || header.meeting_slots != kMeetingSlots ||
      header.tally_bytes != static_cast<uint64_t>(TallyLayout(sizes).tally_bytes)) {
    return Error(Code::kFailedPrecondition, "SpecMismatchError")
        .Says("group " + options_.name + ": the board was made for " +
              std::to_string(header.world_size) + " ranks and windows of " +
              std::to_string(header.window_bytes) + " bytes, this process expects " +
              std::to_string(sizes.world_size) + " and " + std::to_string(window_bytes()))
        .With("object", std::string("group"));
  }
  return Status();
}

// Reads the seats of this node's ranks.
Status Group::ReadSeats() {
  const auto* seats = reinterpret_cast<const uint32_t*>(board_.data() + header_->seats_offset);
  seats_.resize(sizes().world_size);
  for (int64_t rank = 0; rank < sizes().world_size; ++rank) {
    seats_[rank] = int64_t{seats[rank]} - 1;
    const bool missing = seats_[rank] < 0 && local_[rank];
    if (!missing && seats_[rank] < header_->num_here) continue;
    return InvalidArgument("the board of group " + options_.name + " has " +
                           std::to_string(header_->num_here) + " ranks of this node, and rank " +
                           std::to_string(rank) + " is not one of them")
        .With("argument", std::string("local_ranks"));
  }
  first_here_ = std::find(seats_.begin(), seats_.end(), 0) - seats_.begin();
  return options_.window_bytes > 0 ? Status() : CheckDomains();
}

// Checks that each domain of this node meets at the place of its first rank.
Status Group::CheckDomains() const {
  for (int64_t rank = 0; rank < sizes().world_size; ++rank) {
    const int64_t ep_rank = rank % sizes().ep_size;
    const int64_t first = seats_[rank - ep_rank];
    const int64_t wanted = first < 0 ? -1 : first + ep_rank;
    if (seats_[rank] == wanted && (first < 0 || (first % sizes().ep_size == 0 &&
                                                 first / sizes().ep_size < header_->num_domains))) {
      continue;
    }
    return InvalidArgument("the board of group " + options_.name +
                           " has a part of the EP group of rank " + std::to_string(rank));
  }
  return Status();
}

void Group::BindBoard() {
  handles_ = reinterpret_cast<HandleRecord*>(board_.data() + header_->handles_offset);
  failures_.Bind(header_,
                 reinterpret_cast<FailureRecord*>(board_.data() + header_->failures_offset));
  const PoisonWatch poison{&header_->poison_generation, options_.generation};
  if (header_->world_offset != 0) {
    world_ = MeetingPlace(board_.data() + header_->world_offset, poison);
  }
  ranks_ = reinterpret_cast<RankRecord*>(board_.data() + header_->ranks_offset);
  for (int64_t rank : options_.local_ranks) {
    ranks_[seat(rank)].pid = static_cast<uint32_t>(getpid());
    ranks_[seat(rank)].left.store(0, std::memory_order_relaxed);
  }
  for (int64_t at = 0; at < header_->num_here; ++at) {
    telemetry_.push_back(std::make_unique<RankTelemetry>(&ranks_[at]));
    tallies_.emplace_back(board_.data() + header_->tallies_offset + at * header_->tally_bytes,
                          sizes());
  }
  for (int64_t domain = 0; domain < header_->num_domains; ++domain) {
    domains_.emplace_back(board_.data() + header_->domains_offset + domain * header_->domain_bytes,
                          poison);
  }
  for (int64_t first = 0; first < sizes().world_size; first += sizes().ep_size) {
    if (!options_.debug || windows_.empty() || seat(first) < 0) continue;
    domain_of(first).on_grant = [this, first](int lane) {
      for (int64_t rank = first; rank < first + sizes().ep_size; ++rank) {
        std::memset(LaneStart(rank, lane), 0xFF, lane_layout_.lane_bytes);
      }
    };
  }
}

Status Group::ClosedError(const std::string& layer_name) const {
  return ClosedLayer(layer_name, options_.name, options_.generation);
}

// Returns the pid of a rank's process; 0 for a rank of another node.
int64_t Group::PidOf(int64_t world_rank) const {
  return seat(world_rank) < 0 ? 0 : ranks_[seat(world_rank)].pid;
}

Status Group::LeftError(const std::string& layer_name, OpCode op, int64_t world_rank) const {
  const int64_t pid = PidOf(world_rank);
  return Stale(std::string(OpName(op)) + " of layer " + layer_name + ": process " +
               std::to_string(pid) + " of rank " + std::to_string(world_rank) + " closed group " +
               options_.name + " generation " + std::to_string(options_.generation) +
               " and will not join this call")
      .With("layer", layer_name)
      .With("op", std::string(OpName(op)))
      .With("rank", world_rank)
      .With("process", pid)
      .With("group", options_.name)
      .With("generation", static_cast<int64_t>(options_.generation));
}

// Returns who ended the group, and with which command.
std::string Group::By(const char* command) const {
  const uint32_t uid = header_->poison_uid.load(std::memory_order_relaxed);
  const uint32_t pid = header_->poison_pid.load(std::memory_order_relaxed);
  const std::string who = uid == 0 && pid == 0
                              ? "an operator"
                              : "uid " + std::to_string(uid) + " (pid " + std::to_string(pid) + ")";
  const char* note = header_->poison_note;
  return " by " + who + " with " + command +
         std::string(note, strnlen(note, sizeof(header_->poison_note)));
}

std::string Group::Described() const {
  return "group " + options_.name + " generation " + std::to_string(options_.generation);
}

Error Group::PeerLost() const {
  const int64_t rank = header_->poison_rank.load(std::memory_order_relaxed);
  const bool known = rank >= 0 && rank < sizes().world_size;
  const int64_t pid = known ? PidOf(rank) : 0;
  // The process may still be alive: ranks that cannot reach each other count as lost too.
  std::string who = "a peer";
  if (known && pid > 0) who = "process " + std::to_string(pid) + " of rank " + std::to_string(rank);
  if (known && pid == 0) who = "the process of rank " + std::to_string(rank) + ", on another node,";
  return Error(Code::kAborted, "PeerLostError")
      .Says(who + " in " + Described() + " is gone")
      .With("rank", rank)
      .With("process", pid);
}

// Returns the error after a fence. The process whose session was fenced gets another error class
// than its peers.
Error Group::Fenced() const {
  const int64_t rank = header_->poison_rank.load(std::memory_order_relaxed);
  const bool known = rank >= 0 && rank < sizes().world_size;
  const std::string fenced = " was fenced" + By("ep-runtime fence");
  if (!known || local_[rank]) {
    return Error(Code::kUnauthenticated, "SessionFencedError")
        .Says(Described() + ": its session" + fenced + "; connect again and create the group anew");
  }
  const int64_t pid = PidOf(rank);
  std::string job;
  const std::string of_job =
      options_.settings.Read("job", &job).ok() ? ", job '" + job + "'" : std::string();
  return Error(Code::kAborted, "PeerLostError")
      .Says("the session of rank " + std::to_string(rank) + " (pid " + std::to_string(pid) +
            of_job + ")" + fenced + "; " + Described() + " is broken")
      .With("rank", rank)
      .With("process", pid);
}

Error Group::TakenAway() const {
  const auto reason = static_cast<PoisonReason>(header_->poison_reason.load());
  if (reason == PoisonReason::kReclaimed) {
    return Stale(Described() + " was reclaimed" + By("ep-runtime reclaim"));
  }
  if (header_->poison_pid.load(std::memory_order_relaxed) != 0) {
    return Stale(Described() + " was replaced" + By("create_group(replace=True)"));
  }
  return Stale(Described() + " is closed");
}

Status Group::Alive(const std::string& layer_name, OpCode op, int64_t epoch) const {
  if (!Poisoned()) return Status();
  const auto reason =
      static_cast<PoisonReason>(header_->poison_reason.load(std::memory_order_relaxed));
  Error error = reason == PoisonReason::kPeerLost ? PeerLost()
                : reason == PoisonReason::kFenced ? Fenced()
                                                  : TakenAway();
  return error.In(std::string(OpName(op)) + " of layer " + layer_name)
      .With("layer", layer_name)
      .With("op", std::string(OpName(op)))
      .With("epoch", epoch)
      .With("group", options_.name)
      .With("generation", static_cast<int64_t>(options_.generation));
}

bool Group::Poisoned() const {
  return header_->poison_generation.load(std::memory_order_acquire) >= options_.generation;
}

Status Group::AtStart(uint64_t run, const std::string& layer_name, OpCode op) {
  return starts_.Decide(run, [&] { return Alive(layer_name, op, /*epoch=*/0); });
}

void Group::Close(int64_t timeout_ns) {
  const bool quiet = calls_.Close(timeout_ns);
  std::lock_guard<std::mutex> lock(mutex_);
  if (device_ != nullptr && quiet) device_->Close();
  for (int64_t rank : options_.local_ranks) {
    ranks_[seat(rank)].left.store(1, std::memory_order_release);
  }
}

Status Group::RunFailure(uint64_t run) {
  Runs& runs = ThisProcessRuns();
  if (several_processes()) failures_.Import(&runs.failed_runs);
  return runs.failed_runs.Get(run, runs.launches);
}

void Group::FailRun(uint64_t run, const Status& error) {
  if (Poisoned()) {  // poison ends every run anyway
    RecordError(error.text());
    return;
  }
  Runs& runs = ThisProcessRuns();
  runs.failed_runs.Add(run, error, [&] {
    if (!several_processes()) return;
    // Processes that have not reached this site will still reach it, because all work that it
    // depends on is done on all devices.
    const auto reached = runs.launches.ReachedIn(run);
    if (!reached.empty()) failures_.Publish(reached.front(), error);
  });
  RecordError(error.text());
}

void Group::RecordError(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (first_error_.empty()) first_error_ = text;
}

std::string Group::TakeError() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (first_error_.empty() && device_ != nullptr) return device_->TakeError();
  return std::exchange(first_error_, std::string());
}

void Group::FillStaging(int byte) {
  for (const Mapping& window : windows_) {
    if (window.bytes() > 0) std::memset(window.data(), byte, window.bytes());
  }
  if (device_ != nullptr) device_->FillStaging(byte);
}

}  // namespace ep_runtime
