// MeetingPlace: lets the ranks of a call find each other.
//
// Devices start independent calls in different orders. So ranks meet by the call's key, and only
// the last rank to arrive takes a lane: ranks that took lanes before all have met could deadlock.
#ifndef EP_RUNTIME_CORE_MEETING_MEETING_H_
#define EP_RUNTIME_CORE_MEETING_MEETING_H_

#include <cstdint>
#include <functional>
#include <string>

#include "core/base/status.h"
#include "core/memory/board.h"
#include "core/runs/launches.h"

namespace ep_runtime {

// Identifies one call of one program run, with the same value on every rank.
struct CallKey {
  uint64_t call;    // number of the call site, and how often the site ran before in this run
  uint64_t launch;  // number of the launch; XLA's run id if one process drives all ranks
};

// The call site of a key, by the name that all processes share. All fields are 0 if one process
// drives all ranks.
struct CallSite {
  uint64_t name;
  uint32_t ordinal;     // index among this process's sites of the same layer, handle and op
  uint32_t repetition;  // how often the site ran before in this run
};

// Description of a call. Ranks that meet under one key must agree on it.
struct CallTag {
  CallKey key;
  uint64_t run;  // XLA's id of the run in this process
  CallSite site;
  OpCode op;
  uint64_t layer_id;
  uint32_t handle;
};

struct Verdict {
  int32_t rank = -1;  // lowest rank that overflowed, or -1
  int64_t demand = 0;
  int64_t capacity = 0;
};

// The word on the board that ends every wait of a generation, and the generation.
struct PoisonWatch {
  const Word64* word;
  uint64_t generation;
  bool poisoned() const { return word->load(std::memory_order_acquire) >= generation; }
};

// A meeting place on the board. A domain's place grants lanes. The group's place has no lanes and
// gathers a verdict. Pointers stay valid as long as the board is mapped.
class MeetingPlace {
 public:
  // Only meetings that have not changed for this long are searched for misfits.
  static constexpr int64_t kMisfitNs = 4'000'000'000;

  MeetingPlace() = default;
  MeetingPlace(uint8_t* control, PoisonWatch poison);

  // Joins the meeting of `tag.key` as `rank`, without waiting. The slot is held until Leave. The
  // meeting keeps the verdict of the lowest rank that has one.
  Status Join(const CallTag& tag, int rank, const Verdict& verdict, MeetingSlot** slot);

  // Leaves a joined slot; the last rank to leave frees the lane and grants it to the next meeting.
  void Leave(MeetingSlot* slot, bool failed);

  Lane& lane(int index) const { return lanes_[index]; }
  Word& phase(int lane, int rank) const { return phases_[lane * ranks_ + rank].phase; }
  // When the rank joined the call that holds the lane. Before the rank's first signal this may
  // still be the time of an earlier call.
  Word64& joined_ns(int lane, int rank) const { return phases_[lane * ranks_ + rank].joined_ns; }
  int ranks() const { return static_cast<int>(ranks_); }

  // Returns the lowest rank that has not joined, or -1.
  int FirstMissing(const MeetingSlot& slot) const;
  bool Joined(const MeetingSlot& slot, int rank) const {
    return ArrivedIn(slot)[rank / 64].load(std::memory_order_acquire) >> (rank % 64) & 1;
  }

  // Another meeting of the same layer, handle and op, which ranks missing from `slot` have joined
  // instead. Neither meeting has changed for kMisfitNs.
  struct Misfit {
    std::string text;  // names both meetings; empty without a misfit
    Launches::Reached other{};
    // True if this process's part of the run has no such call, so that neither meeting can ever be
    // complete. If false, the ranks may only have reached two independent calls in different
    // orders.
    bool certain = false;
  };
  Misfit FindMisfit(const MeetingSlot& slot);

  // Runs under the lock each time a lane is granted. Debug mode fills the lane with this function.
  std::function<void(int lane)> on_grant;

 private:
  MeetingSlot* Find(const CallKey& key);
  MeetingSlot* Open(const CallTag& tag);
  void Free(MeetingSlot* slot);
  void GrantOrQueue(MeetingSlot* slot);
  bool Grant(MeetingSlot* slot);
  void RemoveFromReady(MeetingSlot* slot);
  MeetingSlot* SlotAt(uint32_t index) const {
    return reinterpret_cast<MeetingSlot*>(slots_ + (index - 1) * slot_bytes_);
  }
  uint32_t IndexOf(const MeetingSlot* slot) const {
    return static_cast<uint32_t>((reinterpret_cast<const uint8_t*>(slot) - slots_) / slot_bytes_) +
           1;
  }
  // Returns the words of `arrived`, of which the struct declares the first.
  static const Word64* ArrivedIn(const MeetingSlot& slot) { return slot.arrived; }
  static Word64* ArrivedIn(MeetingSlot* slot) { return slot->arrived; }

  bool SameOp(const MeetingSlot& one, const MeetingSlot& other) const;
  bool Overlap(const MeetingSlot& one, const MeetingSlot& other) const;
  std::string RanksOf(const MeetingSlot& slot) const;
  std::string Describe(const MeetingSlot& slot) const;

  PoisonWatch poison_{};
  Control* control_ = nullptr;
  Lane* lanes_ = nullptr;
  PhaseWord* phases_ = nullptr;
  uint32_t* heads_ = nullptr;
  uint8_t* slots_ = nullptr;
  int64_t slot_bytes_ = 0;
  uint32_t ranks_ = 0;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEETING_MEETING_H_
