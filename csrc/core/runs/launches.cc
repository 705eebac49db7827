// Launches: gives an executable's launches the same numbers in all processes.
#include "core/runs/launches.h"

#include <algorithm>

namespace ep_runtime {
namespace {

// Launches that reach no call site may be many in total, but fewer than this in a row.
constexpr int32_t kMaxGap = 1024;

int32_t After(uint32_t run, uint32_t earlier) { return static_cast<int32_t>(run - earlier); }

}  // namespace

Launches::Moment Launches::Now() {
  std::lock_guard<std::mutex> lock(mutex_);
  return ++clock_;
}

uint32_t Launches::NumberOf(uint64_t run, uint64_t site, Moment born) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = runs_.Add(run);
  if (is_new) found.number = Count(static_cast<uint32_t>(run), born);
  found.sites.push_back(site);
  return found.number;
}

std::vector<Launches::Reached> Launches::ReachedIn(uint64_t run) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Reached> reached;
  const Run* found = runs_.Find(run);
  if (found == nullptr) return reached;
  for (uint64_t site : found->sites) reached.push_back({site, found->number});
  return reached;
}

uint32_t Launches::Count(uint32_t run, Moment born) {
  Family& family = FamilyOf(run);
  Executable& executable = ExecutableOf(family, run, born);
  const int32_t step = After(run, executable.run);
  const uint32_t number = executable.number + static_cast<uint32_t>(step) - executable.skipped;
  if (step >= 0) {
    for (Executable& other : family.executables) {
      if (&other != &executable && After(run, other.run) > 0) ++other.skipped;
    }
    executable = {executable.after, run, number, 0};
  }
  if (After(run, family.newest) > 0) family.newest = run;
  family.moments.push_back(++clock_);
  if (family.moments.size() > kMaxRuns) family.moments.pop_front();
  return number;
}

Launches::Family& Launches::FamilyOf(uint32_t run) {
  for (Family& family : families_) {
    const int32_t step = After(run, family.newest);
    const int32_t span = After(family.newest, family.first);
    if (step <= kMaxGap && step >= -span) return family;
  }
  families_.push_back({run, run, clock_, {}, {}});
  return families_.back();
}

Launches::Executable& Launches::ExecutableOf(Family& family, uint32_t run, Moment born) {
  Moment after = 0;
  if (born > family.began) {
    for (const Executable& each : family.executables) {
      if (each.after < born) after = std::max(after, each.after);
    }
    auto later = std::upper_bound(family.moments.begin(), family.moments.end(), born);
    if (later != family.moments.begin()) after = *--later;
  }
  for (Executable& each : family.executables) {
    if (each.after == after) return each;
  }
  family.executables.push_back({after, run, 0, 0});
  return family.executables.back();
}

}  // namespace ep_runtime
