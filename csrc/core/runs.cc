#include "core/runs.h"

#include "core/per_process.h"

namespace ep_runtime {

Runs& ThisProcessRuns() { return OfThisProcess<Runs>(); }

}  // namespace ep_runtime
