// Finds two meetings that can never be complete, because processes with different programs give one
// call different names.

#include <string>

#include "core/meeting/meeting.h"
#include "core/runs/runs.h"

namespace ep_runtime {
namespace {

constexpr int kMaxNamedRanks = 32;  // an error names the first ranks of a meeting

}  // namespace

bool MeetingPlace::Overlap(const MeetingSlot& one, const MeetingSlot& other) const {
  for (int64_t i = 0; i < ArrivedWords(ranks_); ++i) {
    if (ArrivedIn(one)[i].load(std::memory_order_relaxed) &
        ArrivedIn(other)[i].load(std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

std::string MeetingPlace::RanksOf(const MeetingSlot& slot) const {
  std::string text;
  int named = 0;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (!Joined(slot, static_cast<int>(rank)) || ++named > kMaxNamedRanks) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  const int more = named - kMaxNamedRanks;
  return "EP ranks [" + text + "]" + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

bool MeetingPlace::SameOp(const MeetingSlot& one, const MeetingSlot& other) const {
  return one.layer_id == other.layer_id && one.handle == other.handle && one.op == other.op;
}

std::string MeetingPlace::Describe(const MeetingSlot& slot) const {
  return RanksOf(slot) + " at call " + std::to_string(slot.site_ordinal) + " repetition " +
         std::to_string(slot.repetition) + " of launch " + std::to_string(slot.key[1]);
}

MeetingPlace::Misfit MeetingPlace::FindMisfit(const MeetingSlot& slot) {
  SharedLock lock(&control_->lock);
  if (!lock.Lock(kWaitSliceNs, [&] { return poison_.poisoned(); })) return {};
  const auto settled = static_cast<uint64_t>(NowNs() - kMisfitNs);
  Misfit found;
  for (uint32_t i = 1; i <= control_->used_slots && !found.certain; ++i) {
    const MeetingSlot& each = *SlotAt(i);
    if (each.state.load(std::memory_order_relaxed) != kSlotGathering || &each == &slot ||
        !SameOp(slot, each) || each.changed_ns > settled || slot.changed_ns > settled ||
        Overlap(slot, each)) {
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
