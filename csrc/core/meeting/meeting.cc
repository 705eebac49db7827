// MeetingPlace: lets ranks join and leave calls, and grants lanes.
#include "core/meeting/meeting.h"

#include <unistd.h>

#include <string>

namespace ep_runtime {
namespace {

// Critical sections last microseconds. If a lock is held longer than this, its holder is stopped or
// dead.
constexpr int64_t kLockBudgetNs = 20'000'000'000;

uint32_t HashOf(const CallKey& key) {
  uint64_t mixed = (key.call ^ (key.launch * 0x9E3779B97F4A7C15u)) * 0xD6E8FEB86659FD93u;
  return static_cast<uint32_t>(mixed >> 40) % kMeetingSlots;
}

class Locked {
 public:
  // The lock of a dead holder is never released. Its peers leave when its death poisons the
  // generation.
  Locked(Control* control, const PoisonWatch& poison)
      : lock_(&control->lock), held_(lock_.Lock(kLockBudgetNs, [&] { return poison.poisoned(); })) {
    if (held_) control->owner.store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
  }
  ~Locked() {
    if (held_) lock_.Unlock();
  }
  bool held() const { return held_; }

 private:
  SharedLock lock_;
  bool held_;
};

}  // namespace

MeetingPlace::MeetingPlace(uint8_t* control, PoisonWatch poison)
    : poison_(poison), control_(reinterpret_cast<Control*>(control)), ranks_(control_->ranks) {
  uint8_t* next = control + sizeof(Control);
  lanes_ = reinterpret_cast<Lane*>(next);
  next += control_->lanes * sizeof(Lane);
  phases_ = reinterpret_cast<PhaseWord*>(next);
  next += size_t{control_->lanes} * ranks_ * sizeof(PhaseWord);
  heads_ = reinterpret_cast<uint32_t*>(next);
  next += size_t{kMeetingSlots} * 4;
  slots_ = next;
  slot_bytes_ = SlotBytes(ranks_);
}

MeetingSlot* MeetingPlace::Find(const CallKey& key) {
  uint32_t index = heads_[HashOf(key)];
  while (index != 0) {
    MeetingSlot* slot = SlotAt(index);
    if (slot->key[0] == key.call && slot->key[1] == key.launch) return slot;
    index = slot->hash_next;
  }
  return nullptr;
}

MeetingSlot* MeetingPlace::Open(const CallTag& tag) {
  uint32_t index = control_->free_slot;
  if (index != 0) {
    control_->free_slot = SlotAt(index)->hash_next;
  } else if (control_->used_slots < kMeetingSlots) {
    index = ++control_->used_slots;
  } else {
    return nullptr;
  }
  MeetingSlot* slot = SlotAt(index);
  slot->inside = 0;
  slot->key[0] = tag.key.call;
  slot->key[1] = tag.key.launch;
  slot->layer_id = tag.layer_id;
  slot->op = static_cast<uint32_t>(tag.op);
  slot->handle = tag.handle;
  slot->lane = -1;
  slot->ready_next = 0;
  slot->verdict_rank = -1;
  slot->epoch = 0;
  slot->opened_ns = static_cast<uint64_t>(NowNs());
  slot->site_name = tag.site.name;
  slot->site_ordinal = tag.site.ordinal;
  slot->repetition = tag.site.repetition;
  slot->run = tag.run;
  for (int64_t i = 0; i < ArrivedWords(ranks_); ++i) {
    ArrivedIn(slot)[i].store(0, std::memory_order_relaxed);
  }
  uint32_t& head = heads_[HashOf(tag.key)];
  slot->hash_next = head;
  head = index;
  ++control_->open_meetings;
  slot->state.store(kSlotGathering, std::memory_order_release);
  return slot;
}

void MeetingPlace::Free(MeetingSlot* slot) {
  const uint32_t index = IndexOf(slot);
  uint32_t* link = &heads_[HashOf(CallKey{slot->key[0], slot->key[1]})];
  while (*link != index) link = &SlotAt(*link)->hash_next;
  *link = slot->hash_next;
  slot->hash_next = control_->free_slot;
  control_->free_slot = index;
  --control_->open_meetings;
  slot->state.store(kSlotFree, std::memory_order_release);
}

Status MeetingPlace::Join(const CallTag& tag, int rank, const Verdict& verdict, MeetingSlot** out) {
  Locked lock(control_, poison_);
  if (!lock.held()) {
    return Internal("the meeting lock stayed taken: process " +
                    std::to_string(control_->owner.load(std::memory_order_relaxed)) +
                    " of the group is stopped or dead");
  }
  MeetingSlot* slot = Find(tag.key);
  if (slot == nullptr) slot = Open(tag);
  if (slot == nullptr) {
    return Error(Code::kResourceExhausted, "EpRuntimeError")
        .Says("more than " + std::to_string(kMeetingSlots) +
              " calls of one EP group are open at the same time; make some of them depend on "
              "each other")
        .With("open_meetings", int64_t{control_->open_meetings});
  }
  if (slot->op != static_cast<uint32_t>(tag.op) || slot->layer_id != tag.layer_id ||
      slot->handle != tag.handle) {
    return Error(Code::kFailedPrecondition, "SpecMismatchError")
        .Says("two calls met: rank " + std::to_string(rank) + " runs " + OpName(tag.op) +
              " of layer id " + std::to_string(tag.layer_id) + ", its peers run " +
              OpName(static_cast<OpCode>(slot->op)) + " of layer id " +
              std::to_string(slot->layer_id) + "; use different handles")
        .With("object", std::string("call"))
        .With("rank", int64_t{rank});
  }
  Word64& mask = ArrivedIn(slot)[rank / 64];
  const uint64_t bit = uint64_t{1} << (rank % 64);
  if (mask.load(std::memory_order_relaxed) & bit) {
    return InvalidArgument("two devices say they are rank " + std::to_string(rank) + " in one " +
                           OpName(tag.op))
        .With("rank", int64_t{rank});
  }
  ++slot->inside;
  slot->changed_ns = static_cast<uint64_t>(NowNs());
  if (verdict.rank >= 0 && (slot->verdict_rank < 0 || verdict.rank < slot->verdict_rank)) {
    slot->verdict_rank = verdict.rank;
    slot->verdict_demand = verdict.demand;
    slot->verdict_capacity = verdict.capacity;
  }
  mask.fetch_or(bit, std::memory_order_release);
  // A failed meeting grants no lane. A rank that joins it late sees the state and leaves.
  if (slot->state.load(std::memory_order_relaxed) == kSlotGathering && slot->inside == ranks_) {
    GrantOrQueue(slot);
  }
  *out = slot;
  return Status();
}

void MeetingPlace::GrantOrQueue(MeetingSlot* slot) {
  if (Grant(slot)) return;
  slot->state.store(kSlotQueued, std::memory_order_release);
  const uint32_t index = IndexOf(slot);
  if (control_->ready_tail == 0) {
    control_->ready_head = index;
  } else {
    SlotAt(control_->ready_tail)->ready_next = index;
  }
  control_->ready_tail = index;
}

bool MeetingPlace::Grant(MeetingSlot* slot) {
  uint32_t index = 0;
  if (control_->lanes > 0) {
    while (index < control_->lanes && lanes_[index].busy) ++index;
    if (index == control_->lanes) return false;
    Lane& lane = lanes_[index];
    lane.busy = 1;
    lane.slot = IndexOf(slot);
    lane.epoch = ++control_->next_epoch;
    lane.failed.store(0, std::memory_order_relaxed);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      phase(index, rank).store(0, std::memory_order_relaxed);
    }
    slot->lane = static_cast<int32_t>(index);
    slot->epoch = lane.epoch;
    if (on_grant) on_grant(index);
  }
  slot->state.store(kSlotGranted, std::memory_order_release);
  FutexWakeAll(&slot->state);
  return true;
}

void MeetingPlace::RemoveFromReady(MeetingSlot* slot) {
  const uint32_t index = IndexOf(slot);
  uint32_t previous = 0;
  for (uint32_t at = control_->ready_head; at != 0; at = SlotAt(at)->ready_next) {
    if (at == index) {
      (previous ? SlotAt(previous)->ready_next : control_->ready_head) = slot->ready_next;
      if (control_->ready_tail == index) control_->ready_tail = previous;
      return;
    }
    previous = at;
  }
}

void MeetingPlace::Leave(MeetingSlot* slot, bool failed) {
  Locked lock(control_, poison_);
  if (!lock.held()) return;  // the generation is over; the board is formatted before reuse
  const uint32_t state = slot->state.load(std::memory_order_relaxed);
  if (failed && (state == kSlotGathering || state == kSlotQueued)) {
    if (state == kSlotQueued) RemoveFromReady(slot);
    slot->state.store(kSlotFailed, std::memory_order_release);
    FutexWakeAll(&slot->state);
  }
  if (--slot->inside > 0) return;
  const int32_t lane = slot->lane;
  Free(slot);
  if (lane < 0) return;
  lanes_[lane].busy = 0;
  const uint32_t next = control_->ready_head;
  if (next == 0) return;
  MeetingSlot* ready = SlotAt(next);
  control_->ready_head = ready->ready_next;
  if (control_->ready_head == 0) control_->ready_tail = 0;
  ready->ready_next = 0;
  Grant(ready);
}

int MeetingPlace::FirstMissing(const MeetingSlot& slot) const {
  for (uint32_t first = 0; first < ranks_; first += 64) {
    const uint64_t joined = ArrivedIn(slot)[first / 64].load(std::memory_order_acquire);
    if (joined == ~uint64_t{0}) continue;
    const uint32_t rank = first + static_cast<uint32_t>(__builtin_ctzll(~joined));
    return rank < ranks_ ? static_cast<int>(rank) : -1;
  }
  return -1;
}

}  // namespace ep_runtime
