// Launches: gives an executable's launches the same numbers in all processes.
#ifndef EP_RUNTIME_CORE_RUNS_LAUNCHES_H_
#define EP_RUNTIME_CORE_RUNS_LAUNCHES_H_

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "core/base/recent_map.h"

namespace ep_runtime {

// Gives the launches of every executable the same numbers in all processes of a job.
//
// XLA names a launch by a hash of the executable plus a count of launches. Processes cannot compare
// these names: an executable from the persistent cache has another hash than a compiled one, and
// executables with the same hash share a count. But all processes launch an executable equally
// often. So this class counts launches from the first launch that reaches a call site, and leaves
// out launches of other executables that share the count.
class Launches {
 public:
  // A time that orders events in this process.
  using Moment = uint64_t;

  // A call site of an executable, and a launch of that executable in which a device reached the
  // site.
  struct Reached {
    uint64_t site;
    uint32_t launch;
  };

  Moment Now();

  // Returns the number, from 0, of the launch that XLA calls `run`. Its executable has call site
  // `site`, which was created at `born`. Call this when a run first reaches a site.
  uint32_t NumberOf(uint64_t run, uint64_t site, Moment born);

  // Returns the sites reached in `run` so far, in order, or none if the run was long ago.
  std::vector<Reached> ReachedIn(uint64_t run) const;

 private:
  // Larger than the number of runs that XLA keeps in flight.
  static constexpr size_t kMaxRuns = 256;

  // An executable. Executables whose sites were created between the same two launches of a family
  // count as one.
  struct Executable {
    Moment after;      // the family's last launch before the sites were created; 0: none
    uint32_t run;      // its newest launch
    uint32_t number;   // the number of that launch
    uint32_t skipped;  // launches of the family's other executables since then
  };
  // Executables that share XLA's count, so that their run ids follow each other.
  struct Family {
    uint32_t first;  // the first run of the family
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
