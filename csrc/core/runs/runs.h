// Runs: names and failures of this process's runs.
#ifndef EP_RUNTIME_CORE_RUNS_RUNS_H_
#define EP_RUNTIME_CORE_RUNS_RUNS_H_

#include "core/runs/failed_runs.h"
#include "core/runs/launches.h"
#include "core/runs/site_names.h"

namespace ep_runtime {

// Runs of this process's programs: the names that all processes use for them, and which of them
// failed.
struct Runs {
  FailedRuns failed_runs;
  SiteNames site_names;
  Launches launches;
};
Runs& ThisProcessRuns();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_RUNS_RUNS_H_
