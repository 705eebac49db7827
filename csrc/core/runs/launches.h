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
// XLA names a launch by a hash of the executable plus a count of launches. No process can compare
// that with another's: an executable that came out of the persistent cache has another hash than
// one that was compiled, and executables of one hash share a count. What processes do share is how
// often each of them launched an executable. So launches are counted from the first one of which a
// call site heard, and those of other executables with the same count are left out.
class Launches {
 public:
  // Orders what happened in this process.
  using Moment = uint64_t;

  // A call site that some executable has, and a launch of it in which a device reached the site.
  struct Reached {
    uint64_t site;
    uint32_t launch;
  };

  Moment Now();

  // The number, from 0, of the launch that XLA calls `run`, of the executable that has call site
  // `site`, which was made at `born`. Called when a site hears of a run for the first time.
  uint32_t NumberOf(uint64_t run, uint64_t site, Moment born);

  // The sites that were reached in `run` so far, the first one first; none of a run long ago.
  std::vector<Reached> ReachedIn(uint64_t run) const;

 private:
  // More than XLA keeps in flight.
  static constexpr size_t kMaxRuns = 256;

  // Executables whose sites were made between the same launches of a family count as one.
  struct Executable {
    Moment after;      // the family's last launch before its sites were made, 0: none
    uint32_t run;      // its newest one
    uint32_t number;   // of that
    uint32_t skipped;  // launches of others in the family since then
  };
  // Executables that share XLA's count, and so have names for their runs that follow each other.
  struct Family {
    uint32_t first;  // run
    uint32_t newest;
    Moment began;
    std::deque<Moment> moments;  // of the newest launches
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
