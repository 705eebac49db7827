// Reads operands of calls that move rows, in XLA's order. CPU and CUDA share this code, so fields
// of their params that are read from operands have the same names.
#ifndef EP_RUNTIME_FFI_MOVEMENT_OPERANDS_H_
#define EP_RUNTIME_FFI_MOVEMENT_OPERANDS_H_

#include <cstdint>
#include <vector>

#include "core/groups/call.h"
#include "cpu/plan_view.h"
#include "ffi/call_frame.h"

namespace ep_runtime {

constexpr size_t kPlanArrays = 9;

struct PlanOperands {
  Operand dst_rank, dst_row, recv_count, staged_start, staged_row, staged_slot, kept, group_sizes,
      num_recv;

  // Reads the plan, and checks its shapes, which follow from `sizes` and the room of a lane.
  template <typename Plan>
  Status Read(const Sizes& sizes, const LaneRoom& room, Plan* plan) const {
    const int64_t ep_size = room.ranks, columns = room.CountColumns(sizes.tokens);
    const Dims slots = {sizes.tokens, sizes.top_k};
    EP_RETURN_IF_ERROR(dst_rank.Read(slots, &plan->dst_rank));
    EP_RETURN_IF_ERROR(dst_row.Read(slots, &plan->dst_row));
    EP_RETURN_IF_ERROR(recv_count.Read({ep_size, columns}, &plan->recv_count));
    EP_RETURN_IF_ERROR(staged_start.Read({ep_size * sizes.tokens + 1}, &plan->staged_start));
    EP_RETURN_IF_ERROR(staged_row.Read({sizes.capacity}, &plan->staged_row));
    EP_RETURN_IF_ERROR(staged_slot.Read({sizes.capacity}, &plan->staged_slot));
    EP_RETURN_IF_ERROR(kept.Read({sizes.experts}, &plan->kept));
    EP_RETURN_IF_ERROR(group_sizes.Read({sizes.experts}, &plan->group_sizes));
    return num_recv.Read({1}, &plan->num_recv);
  }
};

// Returns the plan's operands in `buffers`, from index `first` on.
PlanOperands PlanAt(const CallFrame& frame, const std::vector<Buffer>& buffers, size_t first);

// Checks T, K and H against the limits of the group and the layer. `element_bytes` is the size of
// one row element; rows of bytes may have any width that fits a staged row.
Status CheckSizes(const CallFrame& frame, const CallContext& context, const Sizes& sizes,
                  int64_t element_bytes);

// Whether a plan is for physical experts: a rank's own experts and its slots for copies.
inline bool IsSpread(const Sizes& sizes, const GroupSizes& group) {
  return group.spare_experts > 0 && sizes.experts == group.experts_per_rank() + group.spare_experts;
}
// Checks C and L of a plan. A plan with copies of experts has more experts than the group, and its
// own capacity.
Status CheckPlanned(const CallFrame& frame, const CallContext& context, const Sizes& sizes);

template <typename To>
To SizesAs(const Sizes& sizes) {
  using Int = decltype(To::tokens);
  return {static_cast<Int>(sizes.tokens), static_cast<Int>(sizes.top_k),
          static_cast<Int>(sizes.capacity), static_cast<Int>(sizes.experts),
          static_cast<Int>(sizes.width)};
}

// Below, a Call is a CpuCall or a CudaCall, which checks the rows that its kernels support.

// Reads the sizes and the plan of a call that moves `rows`.
template <typename Call, typename Params>
Status ReadSizes(const Call& call, const Operand& rows, const PlanOperands& plan,
                 const Sizes& sizes, Params* params) {
  EP_RETURN_IF_ERROR(CheckSizes(call.frame, call.context, sizes, rows.element_bytes()));
  EP_RETURN_IF_ERROR(call.ReadRows(rows, sizes.width, params));
  params->sizes = SizesAs<decltype(params->sizes)>(sizes);
  return plan.Read(sizes, call.context.group->lane_layout().room, &params->plan);
}

// ep_prepare_v1(rank, layer_index, topk_idx s32 [T, K]; row_alignment=the layer's)
//   -> the nine plan arrays, and on NVIDIA GPUs maybe `more` results that the caller reads:
//      most s32 [1], rows of the fullest slab, for block calls;
//      experts s32 [N, S] of slots for copies. Then the plan has L + S experts, and rows=the rows
//      that a rank keeps before they are spread
template <typename Call, typename Params>
Status ReadPrepare(const Call& call, Params* params, size_t more = 0) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(3, kPlanArrays + more));
  const auto [rank, layer_index, topk_idx] = call.frame.Args("rank", "layer_index", "topk_idx");
  const PlanOperands plan = PlanAt(call.frame, call.frame.rets, 0);
  const Sizes sizes = {topk_idx.dim(0), topk_idx.dim(1), plan.staged_row.dim(0), plan.kept.dim(0),
                       0};
  EP_RETURN_IF_ERROR(topk_idx.Read({sizes.tokens, sizes.top_k}, &params->topk_idx));
  EP_RETURN_IF_ERROR(CheckSizes(call.frame, call.context, sizes, /*element_bytes=*/0));
  EP_RETURN_IF_ERROR(CheckPlanned(call.frame, call.context, sizes));
  params->sizes = SizesAs<decltype(params->sizes)>(sizes);
  return plan.Read(sizes, call.context.group->lane_layout().room, &params->plan);
}

// ep_dispatch_v1(rank, layer_index, tokens [T, H], weights f32 [T, K] or [0, 0], plan)
//   -> recv [C, H], recv_weights f32 [C] XLA passes a null pointer for an empty array, but null
//   means that the call has no weights. So a rank without tokens passes `no_weights` instead of its
//   empty weights.
template <typename Call, typename Params>
Status ReadDispatch(const Call& call, const float* no_weights, Params* params) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(4 + kPlanArrays, 2));
  const auto [rank, layer_index, tokens, weights] =
      call.frame.Args("rank", "layer_index", "tokens", "weights");
  const auto [recv, recv_weights] = call.frame.Rets("recv", "recv_weights");
  const PlanOperands plan = PlanAt(call.frame, call.frame.args, 4);
  const Sizes sizes = {tokens.dim(0), plan.dst_rank.dim(1), recv.dim(0), plan.kept.dim(0),
                       tokens.dim(1)};
  EP_RETURN_IF_ERROR(tokens.Read(tokens.type(), {sizes.tokens, sizes.width}, &params->tokens));
  EP_RETURN_IF_ERROR(ReadSizes(call, tokens, plan, sizes, params));
  EP_RETURN_IF_ERROR(weights.ReadIfGiven({sizes.tokens, sizes.top_k}, &params->weights));
  if (sizes.tokens == 0 && !weights.absent(2)) params->weights = no_weights;
  EP_RETURN_IF_ERROR(recv.Read(tokens.type(), {sizes.capacity, sizes.width}, &params->recv));
  return recv_weights.Read({sizes.capacity}, &params->recv_weights);
}

// Operands that combine and dispatch's backward share: rows [C, H], and the tokens [T, H] of the
// rows' type or f32 that are their sums.
template <typename Call, typename Params>
Status ReadSums(const Call& call, const Operand& rows, const Operand& tokens, Params* params) {
  const PlanOperands plan = PlanAt(call.frame, call.frame.args, 4);
  const Sizes sizes = {plan.dst_rank.dim(0), plan.dst_rank.dim(1), rows.dim(0), plan.kept.dim(0),
                       rows.dim(1)};
  EP_RETURN_IF_ERROR(rows.Read(rows.type(), {sizes.capacity, sizes.width}, &params->rows));
  EP_RETURN_IF_ERROR(call.ReadSummed(rows, &params->type));
  EP_RETURN_IF_ERROR(ReadSizes(call, rows, plan, sizes, params));
  constexpr auto kWide = TypeOf<float>();
  params->wide_tokens = call.may_widen() && tokens.type() == kWide && rows.element_bytes() < 4;
  return tokens.Read(params->wide_tokens ? kWide : rows.type(), {sizes.tokens, sizes.width},
                     &params->tokens);
}

// ep_combine_v1(rank, layer_index, expert_out [C, H], weights f32 [C] or [0], plan)
//   -> tokens [T, H] of expert_out's type or f32
template <typename Call, typename Params>
Status ReadCombine(const Call& call, Params* params) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(4 + kPlanArrays, 1));
  const auto [rank, layer_index, expert_out, weights] =
      call.frame.Args("rank", "layer_index", "expert_out", "weights");
  const auto [tokens] = call.frame.Rets("tokens");
  EP_RETURN_IF_ERROR(ReadSums(call, expert_out, tokens, params));
  return weights.ReadIfGiven({params->sizes.capacity}, &params->weights);
}

// ep_dispatch_bwd_v1(rank, layer_index, d_recv [C, H], d_weights f32 [C], plan)
//   -> d_tokens [T, H] of d_recv's type or f32, d_topk_weights f32 [T, K]
template <typename Call, typename Params>
Status ReadDispatchBwd(const Call& call, Params* params) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(4 + kPlanArrays, 2));
  const auto [rank, layer_index, d_recv, d_weights] =
      call.frame.Args("rank", "layer_index", "d_recv", "d_weights");
  const auto [d_tokens, d_topk_weights] = call.frame.Rets("tokens", "d_topk_weights");
  EP_RETURN_IF_ERROR(ReadSums(call, d_recv, d_tokens, params));
  EP_RETURN_IF_ERROR(d_weights.Read({params->sizes.capacity}, &params->d_weights));
  return d_topk_weights.Read({params->sizes.tokens, params->sizes.top_k}, &params->d_topk_weights);
}

// ep_combine_bwd_v1(rank, layer_index, g [T, H], expert_out [C, H] or [0, 0],
//                   weights f32 [C] or [0], plan)
//   -> d_expert_out [C, H], d_weights f32 [C], or [0] without expert_out
template <typename Call, typename Params>
Status ReadCombineBwd(const Call& call, Params* params) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(5 + kPlanArrays, 2));
  const auto [rank, layer_index, grad, expert_out, weights] =
      call.frame.Args("rank", "layer_index", "g", "expert_out", "weights");
  const auto [d_expert_out, d_weights] = call.frame.Rets("d_expert_out", "d_weights");
  const PlanOperands plan = PlanAt(call.frame, call.frame.args, 5);
  const Sizes sizes = {grad.dim(0), plan.dst_rank.dim(1), d_expert_out.dim(0), plan.kept.dim(0),
                       grad.dim(1)};
  const Dims slab = {sizes.capacity, sizes.width};
  EP_RETURN_IF_ERROR(grad.Read(grad.type(), {sizes.tokens, sizes.width}, &params->grad));
  EP_RETURN_IF_ERROR(call.ReadSummed(grad, &params->type));
  EP_RETURN_IF_ERROR(ReadSizes(call, grad, plan, sizes, params));
  const bool with_weight_grads = !expert_out.absent(2);
  if (with_weight_grads) {
    EP_RETURN_IF_ERROR(expert_out.Read(grad.type(), slab, &params->expert_out));
  }
  EP_RETURN_IF_ERROR(weights.ReadIfGiven({sizes.capacity}, &params->weights));
  EP_RETURN_IF_ERROR(d_expert_out.Read(grad.type(), slab, &params->d_expert_out));
  return d_weights.ReadIf(with_weight_grads, {sizes.capacity}, &params->d_weights);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_MOVEMENT_OPERANDS_H_
