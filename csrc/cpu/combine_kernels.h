#ifndef EP_RUNTIME_CPU_COMBINE_KERNELS_H_
#define EP_RUNTIME_CPU_COMBINE_KERNELS_H_

#include "core/groups/call.h"
#include "cpu/plan_view.h"
#include "cpu/row_ops.h"

namespace ep_runtime {

// combine, and dispatch's backward, which is a combine of d_recv that also carries d_weights.
struct CombineParams {
  Sizes sizes;
  RowType type;
  int64_t row_bytes;
  const void* rows;        // [C, H]
  const float* weights;    // [C] multiplied before the sum, or null
  const float* d_weights;  // [C] returned to their slots, or null
  Plan plan;
  void* tokens;  // [T, H], rows of token_bytes
  int64_t token_bytes;
  bool wide_tokens;       // tokens are fp32, of narrower rows
  float* d_topk_weights;  // [T, K] zeros for unused and dropped slots; null with d_weights
};

// Sums each staged row's rows in slot order, sends the sum to its source, and there sums over
// ranks in order. Partial sums travel as CombinePrecision says, in two passes of half the tokens
// each where a lane does not hold all of them. Wide tokens are sums that are not rounded: they are
// added to others before the result is.
Status RunCombine(Call& call, const CombineParams& params);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_COMBINE_KERNELS_H_
