// The runs of this process.
#include "core/runs/runs.h"

#include "core/base/per_process.h"

namespace ep_runtime {

Runs& ThisProcessRuns() { return OfThisProcess<Runs>(); }

}  // namespace ep_runtime
