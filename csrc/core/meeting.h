// Where the ranks of one call find each other.
//
// Devices start independent calls in different orders, so ranks meet by the call's key, and only
// the last rank to arrive takes a lane: a lane taken on the way to a meeting would be a deadlock.
#ifndef EP_RUNTIME_CORE_MEETING_H_
#define EP_RUNTIME_CORE_MEETING_H_

#include <cstdint>
#include <functional>

#include "core/board.h"
#include "core/status.h"

namespace ep_runtime {

// Names one call of one program run, the same on every rank.
struct CallKey {
  uint64_t call;  // call site, and how often it ran before in this run
  uint64_t run;
};

// What a call is; ranks that meet under one key must agree on it.
struct CallTag {
  CallKey key;
  OpCode op;
  uint64_t layer_id;
  uint32_t handle;
};

struct Verdict {
  int32_t rank = -1;  // lowest rank that overflowed, or -1
  int64_t demand = 0;
  int64_t capacity = 0;
};

// A meeting place on the board: a domain's, whose grants carry a lane, or the group's, which has
// no lanes and gathers a verdict. Pointers stay valid as long as the board is mapped.
class MeetingPlace {
 public:
  MeetingPlace() = default;
  explicit MeetingPlace(uint8_t* control);

  // Joins the meeting of `tag.key` as `rank`, without waiting. The slot is held until Leave.
  // Verdicts of the ranks are merged: the lowest rank with one wins.
  Status Join(const CallTag& tag, int rank, const Verdict& verdict, MeetingSlot** slot);

  // Leaves a joined slot; the last one out frees the lane and grants the next meeting.
  void Leave(MeetingSlot* slot, bool failed);

  Lane& lane(int index) const { return lanes_[index]; }
  Word& phase(int lane, int rank) const { return phases_[lane * ranks_ + rank].phase; }
  int ranks() const { return static_cast<int>(ranks_); }

  // The lowest rank that has not joined, or -1.
  int FirstMissing(const MeetingSlot& slot) const;

  // Runs under the lock each time a lane is granted; debug mode poisons the lane here.
  std::function<void(int lane)> on_grant;

 private:
  MeetingSlot* Find(const CallKey& key);
  MeetingSlot* Open(const CallTag& tag);
  void Free(MeetingSlot* slot);
  void GrantOrQueue(MeetingSlot* slot);
  bool Grant(MeetingSlot* slot);
  void RemoveFromReady(MeetingSlot* slot);
  uint32_t IndexOf(const MeetingSlot* slot) const {
    return static_cast<uint32_t>(slot - slots_) + 1;
  }

  Control* control_ = nullptr;
  Lane* lanes_ = nullptr;
  PhaseWord* phases_ = nullptr;
  uint32_t* heads_ = nullptr;
  MeetingSlot* slots_ = nullptr;
  uint32_t ranks_ = 0;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEETING_H_
