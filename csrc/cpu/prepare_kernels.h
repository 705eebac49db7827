// Kernels of prepare on CPU.
#ifndef EP_RUNTIME_CPU_PREPARE_KERNELS_H_
#define EP_RUNTIME_CPU_PREPARE_KERNELS_H_

#include "core/groups/call.h"
#include "cpu/plan_view.h"

namespace ep_runtime {

struct PrepareParams {
  Sizes sizes;              // width is not used
  const int32_t* topk_idx;  // [T, K] expert of the EP group; a slot with any other number is unused
  MutablePlan plan;         // all elements are written
};

// Routes this rank's slots. Counts travel to all peers, then one entry per kept row to the rank
// that gets the row. All ranks compute the same result from the same count matrix.
Status RunPrepare(Call& call, const PrepareParams& params);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_PREPARE_KERNELS_H_
