// Launches: numbers an executable's launches alike in all processes.
#ifndef EP_RUNTIME_CORE_RUNS_LAUNCHES_H_
#define EP_RUNTIME_CORE_RUNS_LAUNCHES_H_

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "core/base/recent_map.h"

namespace ep_runtime {

// Numbers the launches of every executable alike in all processes of a job.
//
// XLA names a launch by a hash of the executable plus a count of launches. Processes cannot compare
// these names: an executable from the persistent cache has another hash than a compiled one, and
// executables with one hash share a count. But all processes launch an executable equally often. So
// launches are counted from the first one that a call site heard of, and launches of other
// executables with the same count are left out.
class Launches {
 public:
  // Orders events in this process.
  using Moment = uint64_t;

  // A call site of an executable, and a launch of that executable in which a device reached the
  // site.
  struct Reached {
    uint64_t site;
    uint32_t launch;
  };

  Moment Now();

  // Returns the number, from 0, of the launch that XLA calls `run`. Its executable has call site
  // `site`, which was made at `born`. Call this when a site first hears of a run.
  uint32_t NumberOf(uint64_t run, uint64_t site, Moment born);

  // Returns the sites reached in `run` so far, the first one first, or none for a run long ago.
  std::vector<Reached> ReachedIn(uint64_t run) const;

 private:
  // More than XLA keeps in flight.
  static constexpr size_t kMaxRuns = 256;

  // An executable. Executables whose sites were made between the same launches of a family count as
  // one.
  struct Executable {
    Moment after;      // the family's last launch before its sites were made; 0: none
    uint32_t run;      // its newest launch
    uint32_t number;   // the number of that launch
    uint32_t skipped;  // launches of the family's other executables since then
  };
  // Executables that share XLA's count, so that their run ids follow each other.
  struct Family {
    uint32_t first;  // the first run
    uint32_t newest;
    Moment began;
    std::deque<Moment> moments;  // times of the newest launches
    std::vector<Executable> executables;
  };
  struct Run {
    uint32_t number;
    std::vector<uint64_t> sites;
  };

  Family& FamilyOf(uint32_t run);
  static Executable& ExecutableOf(Family& family, uint32_t run, Moment born);
  uint32_t Count(uint32_t run, Moment born);

  mutable std::mutex mutex_;
  Moment clock_ = 0;
  std::deque<Family> families_;
  RecentMap<uint64_t, Run, kMaxRuns> runs_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_RUNS_LAUNCHES_H_
