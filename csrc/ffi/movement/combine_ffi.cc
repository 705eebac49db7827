#include "cpu/combine_kernels.h"
#include "ffi/call_frame.h"

namespace ep_runtime {
namespace {

using xla::ffi::DataType;

// What combine and dispatch's backward share: rows [C, H] at operand 2, weights at 3, the plan
// from 4 on, tokens [T, H] at result 0, of the rows' type or f32.
Status ReadRows(const CallFrame& frame, const CallContext& context, const char* rows_name,
                CombineParams* params) {
  const Buffer& rows = frame.args[2];
  const Buffer& dst_rank = frame.args[4];
  params->sizes = {dst_rank.dim(0), dst_rank.dim(1), rows.dim(0), frame.args[10].dim(0),
                   rows.dim(1)};
  const Sizes& sizes = params->sizes;
  EP_RETURN_IF_ERROR(CheckShape(frame, rows_name, rows, {sizes.capacity, sizes.width}));
  EP_RETURN_IF_ERROR(ReadRowType(frame, rows_name, rows, &params->type));
  EP_RETURN_IF_ERROR(CheckSizes(frame, context, sizes, ElementBytes(rows)));
  MutablePlan plan{};
  EP_RETURN_IF_ERROR(ReadPlan(frame, frame.args, 4, sizes, context.group->sizes().ep_size, &plan));
  const Buffer& tokens = frame.rets[0];
  params->wide_tokens = tokens.dtype == DataType::F32 && ElementBytes(rows) < 4;
  EP_RETURN_IF_ERROR(CheckArray(frame, "tokens", tokens,
                                params->wide_tokens ? DataType::F32 : rows.dtype,
                                {sizes.tokens, sizes.width}));
  params->row_bytes = sizes.width * ElementBytes(rows);
  params->token_bytes = sizes.width * ElementBytes(tokens);
  params->rows = rows.data;
  params->plan = Const(plan);
  params->tokens = tokens.data;
  return Status();
}

Status RunWith(CallContext context, const CombineParams& params) {
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunCombine(running, params); });
}

}  // namespace

// ep_combine_v1(rank, layer_index, expert_out [C, H], weights f32 [C] or [0], plan)
//   -> [T, H] of expert_out's type or f32
Status CallCombine(const CallFrame& frame, CallContext context) {
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 1));
  CombineParams params{};
  EP_RETURN_IF_ERROR(ReadRows(frame, context, "expert_out", &params));
  const Buffer& weights = frame.args[3];
  if (weights.dims != Dims{0}) {
    EP_RETURN_IF_ERROR(
        CheckArray(frame, "weights", weights, DataType::F32, {params.sizes.capacity}));
    params.weights = static_cast<const float*>(weights.data);
  }
  return RunWith(std::move(context), params);
}

// ep_dispatch_bwd_v1(rank, layer_index, d_recv [C, H], d_weights f32 [C], plan)
//   -> d_tokens [T, H] of d_recv's type or f32, d_topk_weights f32 [T, K]
Status CallDispatchBwd(const CallFrame& frame, CallContext context) {
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 2));
  CombineParams params{};
  EP_RETURN_IF_ERROR(ReadRows(frame, context, "d_recv", &params));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "d_weights", frame.args[3], DataType::F32, {params.sizes.capacity}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "d_topk_weights", frame.rets[1], DataType::F32,
                                {params.sizes.tokens, params.sizes.top_k}));
  params.d_weights = static_cast<const float*>(frame.args[3].data);
  params.d_topk_weights = static_cast<float*>(frame.rets[1].data);
  return RunWith(std::move(context), params);
}

}  // namespace ep_runtime
