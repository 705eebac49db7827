// Finds two meetings that can never be complete, because processes with different programs give one
// call different names.

#include <array>
#include <string>

#include "core/meeting/meeting.h"
#include "core/runs/runs.h"

namespace ep_runtime {
namespace {

constexpr size_t kMaskWords = kMaxMeetingRanks / 64;
using Mask = std::array<uint64_t, kMaskWords>;

Mask ArrivedIn(const MeetingSlot& slot) {
  Mask mask;
  for (size_t i = 0; i < kMaskWords; ++i) {
    mask[i] = slot.arrived[i].load(std::memory_order_relaxed);
  }
  return mask;
}

bool Overlap(const Mask& one, const Mask& other) {
  for (size_t i = 0; i < kMaskWords; ++i) {
    if (one[i] & other[i]) return true;
  }
  return false;
}

std::string RanksOf(const Mask& mask) {
  std::string text;
  for (int64_t rank = 0; rank < kMaxMeetingRanks; ++rank) {
    if (!(mask[rank / 64] >> (rank % 64) & 1)) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "EP ranks [" + text + "]";
}

}  // namespace

bool MeetingPlace::SameOp(const MeetingSlot& one, const MeetingSlot& other) const {
  return one.layer_id == other.layer_id && one.handle == other.handle && one.op == other.op;
}

std::string MeetingPlace::Describe(const MeetingSlot& slot) const {
  return RanksOf(ArrivedIn(slot)) + " at call " + std::to_string(slot.site_ordinal) +
         " repetition " + std::to_string(slot.repetition) + " of launch " +
         std::to_string(slot.key[1]);
}

MeetingPlace::Misfit MeetingPlace::FindMisfit(const MeetingSlot& slot) {
  SharedLock lock(&control_->lock);
  if (!lock.Lock(kWaitSliceNs, [&] { return poison_.poisoned(); })) return {};
  const auto settled = static_cast<uint64_t>(NowNs() - kMisfitNs);
  const Mask here = ArrivedIn(slot);
  Misfit found;
  for (uint32_t i = 0; i < control_->used_slots && !found.certain; ++i) {
    const MeetingSlot& each = slots_[i];
    if (each.state.load(std::memory_order_relaxed) != kSlotGathering || &each == &slot ||
        !SameOp(slot, each) || each.changed_ns > settled || slot.changed_ns > settled ||
        Overlap(here, ArrivedIn(each))) {
      continue;
    }
    found.text = Describe(slot) + ", " + Describe(each);
    found.other = {each.site_name, static_cast<uint32_t>(each.key[1])};
    // By now this process has named every site of the run's program, so an unknown name belongs to
    // another program. If XLA's run ids of the two meetings differ, the misfit is not certain, and
    // the wait lasts for its budget.
    found.certain = each.run == slot.run && !ThisProcessRuns().site_names.Contains(each.site_name);
  }
  lock.Unlock();
  return found;
}

}  // namespace ep_runtime
