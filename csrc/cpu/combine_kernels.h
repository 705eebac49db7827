// Kernels of combine on CPU.
#ifndef EP_RUNTIME_CPU_COMBINE_KERNELS_H_
#define EP_RUNTIME_CPU_COMBINE_KERNELS_H_

#include "core/groups/call.h"
#include "cpu/plan_view.h"
#include "cpu/row_ops.h"

namespace ep_runtime {

// Parameters of combine, and of dispatch's backward: a combine of d_recv that also carries
// d_weights.
struct CombineParams {
  Sizes sizes;
  RowType type;
  int64_t row_bytes;
  const void* rows;        // [C, H]
  const float* weights;    // [C] factors of the rows, or null
  const float* d_weights;  // [C] returned to their slots, or null
  Plan plan;
  void* tokens;  // [T, H], rows of token_bytes
  int64_t token_bytes;
  bool wide_tokens;       // true: tokens are f32 although rows are narrower
  float* d_topk_weights;  // [T, K] zeros for unused and dropped slots; null if d_weights is null
};

// Sums the rows of each staged row in slot order and sends the sum to its source, which adds up the
// sums of ranks in order. Sums are sent in the format of CombinePrecision. If a lane has no room
// for all sums, they are sent in two passes of half the tokens each. Wide tokens are unrounded
// sums, which the caller adds to other values before rounding.
Status RunCombine(Call& call, const CombineParams& params);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_COMBINE_KERNELS_H_
