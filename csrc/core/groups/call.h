// Call: one rank's part of a call on CPU.
#ifndef EP_RUNTIME_CORE_GROUPS_CALL_H_
#define EP_RUNTIME_CORE_GROUPS_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/groups/group.h"
#include "core/groups/registry.h"
#include "core/meeting/meeting.h"
#include "core/memory/plan.h"

namespace ep_runtime {

// Everything that identifies one rank's part of a call.
struct CallContext {
  std::shared_ptr<Group> group;
  LayerEntry layer;
  OpCode op = OpCode::kNone;
  int64_t world_rank = 0;
  uint32_t handle = 0;
  int64_t row_alignment = 1;  // alignment of zones in this call's slab; divides the layer's
                              // alignment
  CallKey key{};
  uint64_t run = 0;  // XLA's id of the run in this process
  CallSite site{};
  bool counts = true;  // false: rows are not counted, because the call repeats an earlier one
};

// One rank's part of one call. From Run's meeting to Run's end the ranks of the domain share a
// lane: each writes its part of its peers' windows, signals a phase, and awaits the peers' signals.
//
// Every wait is bounded and ends early when the generation is poisoned or the run has failed.
class Call {
 public:
  explicit Call(CallContext context);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Waits until all peers have joined the call, runs `body` with the lane, and returns the lane. An
  // error of any rank ends the call on all ranks.
  Status Run(const std::function<Status(Call&)>& body);

  // Exchanges the demand of every rank of the world, after Run, in a group with
  // on_overflow="error". Either all ranks return the same CapacityOverflowError, or none does.
  Status GatherVerdict(int64_t demand, int64_t capacity);

  // Signals to the peers that this rank has finished writing `phase` (1, 2, ...) to their windows.
  void Signal(uint32_t phase);
  // Waits until EP rank `source` has signalled `phase`.
  Status Await(int64_t source, uint32_t phase);
  // Removes from `pending` a source that has signalled `phase`. Waits only if no source has.
  Status NextReady(std::vector<int64_t>* pending, uint32_t phase, int64_t* source);

  Group& group() const { return *context_.group; }
  const LayerEntry& layer() const { return context_.layer; }
  Alignments alignments() const { return {layer().alignment, context_.row_alignment}; }
  int64_t ep_rank() const { return ep_rank_; }
  int64_t ep_size() const { return ep_size_; }
  // Returns all EP ranks in the order in which this rank visits sources and destinations: this rank
  // first, then the next ranks, cyclically.
  std::vector<int64_t> Ring() const;

  // Return the parts of EP rank `dest`'s lane that `source` writes.
  uint8_t* Rows(int64_t dest, int64_t source) const {
    return group().Rows(first_rank_ + dest, record_.lane, source);
  }
  uint8_t* Entries(int64_t dest, int64_t source) const {
    return group().Entries(first_rank_ + dest, record_.lane, source);
  }
  int32_t* Counts(int64_t dest, int64_t source) const {
    return group().Counts(first_rank_ + dest, record_.lane, source);
  }

  // Counts rows that the call reports to the board when it ends.
  void CountRows(int64_t rows, int64_t dropped_rows) {
    if (!context_.counts) return;
    rows_ = rows;
    dropped_rows_ = dropped_rows;
  }
  // Adds the load of a prepare: this rank's tokens, and the rows of each of its experts.
  void CountLoad(int64_t tokens, const int64_t* rows) {
    if (context_.counts) tally_.AddLoad(index(), tokens, rows);
  }

 private:
  Status Meet(MeetingPlace& place, int rank, int64_t first_rank, const Verdict& verdict,
              MeetingSlot** slot);
  Status Look(int64_t started_ns, bool gathering, int64_t waiting_for) const;
  Status LookForAbsent(MeetingPlace& place, const MeetingSlot& slot, int64_t first_rank,
                       int64_t started_ns) const;
  Status FailedOnPeer(int64_t rank) const;
  int64_t SliceNs(int64_t started_ns) const;
  Status TimedOut(int64_t waited_ns, int64_t waiting_for) const;
  Status Failed(Status error);
  void WriteHandle(bool running, int64_t now_ns);
  void TallyArrivals();
  uint32_t index() const { return context_.layer.handle_base + context_.handle; }

  CallContext context_;
  int64_t ep_rank_;
  int64_t ep_size_;
  int64_t first_rank_;  // world rank of EP rank 0 of this domain
  MeetingPlace& place_;
  RankTelemetry& telemetry_;
  RankTally& tally_;
  CallRecord record_;
  int64_t started_ns_ = 0;
  int64_t wait_ns_ = 0;
  bool ran_ = false;
  int64_t rows_ = 0;
  int64_t dropped_rows_ = 0;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_CALL_H_
