// Kernels of dispatch and combine's backward on CPU.
#ifndef EP_RUNTIME_CPU_DISPATCH_KERNELS_H_
#define EP_RUNTIME_CPU_DISPATCH_KERNELS_H_

#include "core/groups/call.h"
#include "cpu/plan_view.h"
#include "cpu/row_ops.h"

namespace ep_runtime {

struct DispatchParams {
  Sizes sizes;
  int64_t row_bytes;
  const void* tokens;    // [T, H]
  const float* weights;  // [T, K], or null: weights of 1
  Plan plan;
  void* recv;           // [C, H] zeros in padding; rows past the last zone do not change
  float* recv_weights;  // [C] zeros in padding and past the last zone
};

// Sends each token once to every rank that keeps a row of it and places the rows that arrive.
Status RunDispatch(Call& call, const DispatchParams& params);

struct CombineBwdParams {
  Sizes sizes;
  RowType type;
  int64_t row_bytes;
  const void* grad;        // [T, H]
  const void* expert_out;  // [C, H], or null: no d_weights
  const float* weights;    // [C], or null: weights of 1
  Plan plan;
  void* d_expert_out;  // [C, H] zeros in places without a row
  float* d_weights;    // [C] zeros in places without a row; null if expert_out is null
};

// Sends each token's gradient like a dispatch. The gradient of a row is weight * grad, the gradient
// of its weight is grad . expert_out.
Status RunCombineBwd(Call& call, const CombineBwdParams& params);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_DISPATCH_KERNELS_H_
