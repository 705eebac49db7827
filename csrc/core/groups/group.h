// Group: an open group of this process.
#ifndef EP_RUNTIME_CORE_GROUPS_GROUP_H_
#define EP_RUNTIME_CORE_GROUPS_GROUP_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/settings.h"
#include "core/base/status.h"
#include "core/groups/combine_precision.h"
#include "core/groups/running_calls.h"
#include "core/meeting/failure_ring.h"
#include "core/meeting/meeting.h"
#include "core/meeting/telemetry.h"
#include "core/memory/board.h"
#include "core/memory/layout.h"
#include "core/memory/mapping.h"
#include "core/memory/tally.h"
#include "core/runs/run_starts.h"

namespace ep_runtime {

struct GroupOptions {
  std::string name;
  uint64_t generation;
  GroupSizes sizes;
  Settings settings;
  // Settings that calls read.
  int64_t op_timeout_ns;
  bool error_on_overflow;
  CombinePrecision combine_precision;
  bool debug;                        // true: checks indices, and fills undefined memory with 0xFF
  std::vector<int64_t> local_ranks;  // world ranks that this process drives
  int64_t window_bytes =
      0;  // size of windows that a GroupDevice maps; 0: windows are in host memory
  bool tell_progress = true;  // true: devices write their progress to the board
};

// The part of a group on devices other than the CPU. It is created before the group's first call.
class GroupDevice {
 public:
  virtual ~GroupDevice() = default;
  // Unmaps memory. The group calls this once no call is running.
  virtual void Close() = 0;
  // Returns the first error that a device recorded since the last TakeError, or "".
  virtual std::string TakeError() = 0;
  virtual void FillStaging(int byte) = 0;
};

// One open group of this process: its board and every window it may write. Calls hold the group by
// shared_ptr, so memory stays mapped until the last call has returned.
class Group {
 public:
  // Maps board and windows, and checks that the board belongs to this group. `window_fds` has one
  // fd per world rank, -1 for a rank of another node; it is empty if windows are on devices.
  static Status Open(GroupOptions options, int board_fd, const std::vector<int>& window_fds,
                     std::shared_ptr<Group>* out);

  const GroupOptions& options() const { return options_; }
  const GroupSizes& sizes() const { return options_.sizes; }
  const LaneLayout& lane_layout() const { return lane_layout_; }

  // The following take world ranks of this node.
  MeetingPlace& domain_of(int64_t world_rank) {
    return domains_[seats_[world_rank] / sizes().ep_size];
  }
  RankTelemetry& telemetry(int64_t world_rank) { return *telemetry_[seats_[world_rank]]; }
  RankTally& tally(int64_t world_rank) { return tallies_[seats_[world_rank]]; }
  // Returns where all ranks of the group meet; null if some are on other nodes.
  MeetingPlace* world() { return header_->world_offset == 0 ? nullptr : &world_; }
  // Returns the index of a world rank's records on the board; negative for ranks of other nodes.
  int64_t seat(int64_t world_rank) const { return seats_[world_rank]; }
  HandleRecord& handle_record(uint32_t index) { return handles_[index]; }

  // Return the parts of `lane` in the window of `world_rank` that EP rank `source` writes.
  uint8_t* Rows(int64_t world_rank, int lane, int64_t source) const {
    return LaneStart(world_rank, lane) + source * lane_layout_.source_rows_bytes;
  }
  uint8_t* Entries(int64_t world_rank, int lane, int64_t source) const {
    return LaneStart(world_rank, lane) + lane_layout_.entries_offset +
           source * lane_layout_.source_entries_bytes;
  }
  int32_t* Counts(int64_t world_rank, int lane, int64_t source) const {
    return reinterpret_cast<int32_t*>(LaneStart(world_rank, lane) + lane_layout_.counts_offset +
                                      source * lane_layout_.source_counts_bytes);
  }

  // Whether other processes drive some ranks of this node.
  bool several_processes() const { return num_local_ < header_->num_here; }
  // Returns the lowest world rank of this node, whose process counts calls on the board.
  int64_t first_here() const { return first_here_; }
  bool IsLocal(int64_t world_rank) const { return local_[world_rank]; }
  // Whether the rank's process has closed the group, which it does after its last call has ended.
  bool HasLeft(int64_t world_rank) const {
    const int64_t at = seat(world_rank);
    return at >= 0 && ranks_[at].left.load(std::memory_order_acquire) != 0;
  }
  Status LeftError(const std::string& layer_name, OpCode op, int64_t world_rank) const;

  // Returns success while the generation may be used, otherwise the error with which every call
  // ends.
  Status Alive(const std::string& layer_name, OpCode op, int64_t epoch) const;
  // Like Alive, for the first call of `run` in this process. A run that began before the poison
  // continues to its end; otherwise some devices would wait in an XLA collective for devices whose
  // calls failed.
  Status AtStart(uint64_t run, const std::string& layer_name, OpCode op);
  // Whether every call of the generation must end.
  bool Poisoned() const;
  bool closed() const { return calls_.closed(); }
  Status ClosedError(const std::string& layer_name) const;

  // Counts running calls. Returns false once the group is closed.
  bool BeginCall() { return calls_.Begin(); }
  void EndCall() { calls_.End(); }
  // Refuses further calls and waits at most `timeout_ns` for running calls.
  void Close(int64_t timeout_ns);

  // Returns the error of a failed run, even if it failed in another process.
  Status RunFailure(uint64_t run);
  // Ends the run in all processes with `error`, unless it has failed already.
  void FailRun(uint64_t run, const Status& error);
  // Ends a run that only other processes take part in.
  void FailElsewhere(const Launches::Reached& reached, const Status& error) {
    failures_.Publish(reached, error);
  }

  void RecordError(const std::string& text);
  // Returns the first error since the last TakeError, or "".
  std::string TakeError();

  // Fills every lane of every window. Tests use this to show that stale bytes do not leak.
  void FillStaging(int byte);

  const BoardHeader& header() const { return *header_; }
  // Writes the host's time to the board, because devices write times to records and their own
  // clocks differ.
  void TellTime() {
    header_->now_ns.store(static_cast<uint64_t>(NowNs()), std::memory_order_relaxed);
  }
  void Attach(std::unique_ptr<GroupDevice> device) { device_ = std::move(device); }
  GroupDevice* device() const { return device_.get(); }

 private:
  explicit Group(GroupOptions options)
      : options_(std::move(options)), lane_layout_(options_.sizes) {}

  Status CheckLocalRanks();
  Status CheckHere(const std::vector<int>& window_fds);
  Status CheckBoard(const BoardHeader& header) const;
  Status ReadSeats();
  Status CheckDomains() const;
  int64_t PidOf(int64_t world_rank) const;
  int64_t window_bytes() const;
  std::string By(const char* command) const;
  std::string Described() const;
  Error PeerLost() const;
  Error Fenced() const;
  Error TakenAway() const;
  void BindBoard();
  uint8_t* LaneStart(int64_t world_rank, int lane) const {
    return windows_[world_rank].data() + lane * lane_layout_.lane_bytes;
  }

  GroupOptions options_;
  LaneLayout lane_layout_;
  Mapping board_;
  std::vector<Mapping> windows_;
  BoardHeader* header_ = nullptr;
  RankRecord* ranks_ = nullptr;
  HandleRecord* handles_ = nullptr;
  FailureRing failures_;
  std::vector<int64_t> seats_;  // by world rank, of this process alone: peers may write the board
  std::vector<bool> local_;
  int64_t num_local_ = 0;
  int64_t first_here_ = 0;
  std::vector<MeetingPlace> domains_;
  MeetingPlace world_;
  std::vector<std::unique_ptr<RankTelemetry>> telemetry_;
  std::vector<RankTally> tallies_;

  RunningCalls calls_;
  RunStarts starts_;
  std::mutex mutex_;
  std::string first_error_;
  std::unique_ptr<GroupDevice> device_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_GROUP_H_
