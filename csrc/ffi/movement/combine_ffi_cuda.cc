#include "cuda/movement/combine/combine_kernels.h"
#include "ffi/cuda_call.h"

namespace ep_runtime {
namespace {

using xla::ffi::DataType;

// What combine and dispatch's backward share: rows [C, H] at operand 2, weights at 3, the plan
// from 4 on, tokens [T, H] at result 0, of the rows' type or, with exact combine, f32.
Status ReadRows(const CudaCall& call, const char* rows_name, Sizes* sizes,
                cuda::CombineParams* params) {
  const CallFrame& frame = call.frame;
  const Buffer& rows = frame.args[2];
  const Buffer& dst_rank = frame.args[4];
  *sizes = {dst_rank.dim(0), dst_rank.dim(1), rows.dim(0), frame.args[10].dim(0), rows.dim(1)};
  EP_RETURN_IF_ERROR(CheckShape(frame, rows_name, rows, {sizes->capacity, sizes->width}));
  EP_RETURN_IF_ERROR(call.SummedType(rows_name, rows, &params->type));
  EP_RETURN_IF_ERROR(CheckSizes(frame, call.context, *sizes, ElementBytes(rows)));
  EP_RETURN_IF_ERROR(call.RowBytes(rows_name, rows, sizes->width, &params->row_bytes));
  cuda::MutablePlan plan{};
  EP_RETURN_IF_ERROR(call.ReadPlan(frame.args, 4, *sizes, &plan));
  params->exact = call.context.group->options().exact_combine;
  const Buffer& tokens = frame.rets[0];
  params->wide_tokens =
      params->exact && tokens.dtype == DataType::F32 && params->type != cuda::RowType::kF32;
  EP_RETURN_IF_ERROR(CheckArray(frame, "tokens", tokens,
                                params->wide_tokens ? DataType::F32 : rows.dtype,
                                {sizes->tokens, sizes->width}));
  params->group = call.rank.group;
  params->name = call.name;
  params->op = frame.op;
  params->sizes = ToCuda(*sizes);
  params->source_rows_bytes = call.context.group->lane_layout().source_rows_bytes;
  params->rows = rows.data;
  params->plan = Const(plan);
  params->tokens = tokens.data;
  params->grid = {call.group.blocks().reduce, call.group.blocks().sum};
  return Status();
}

}  // namespace

// ep_combine_v1(rank, layer_index, expert_out [C, H], weights f32 [C] or [0], plan)
//   -> [T, H] of expert_out's type or f32
Status LaunchCombineCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 1));
  Sizes sizes{};
  cuda::CombineParams params{};
  EP_RETURN_IF_ERROR(ReadRows(call, "expert_out", &sizes, &params));
  const Buffer& weights = frame.args[3];
  if (weights.dims != Dims{0}) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", weights, DataType::F32, {sizes.capacity}));
    params.weights = static_cast<const float*>(weights.data);
  }
  return call.Launched(cuda::LaunchCombine(call.stream, params));
}

// ep_dispatch_bwd_v1(rank, layer_index, d_recv [C, H], d_weights f32 [C], plan)
//   -> d_tokens [T, H] of d_recv's type or f32, d_topk_weights f32 [T, K]
Status LaunchDispatchBwdCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 2));
  Sizes sizes{};
  cuda::CombineParams params{};
  EP_RETURN_IF_ERROR(ReadRows(call, "d_recv", &sizes, &params));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "d_weights", frame.args[3], DataType::F32, {sizes.capacity}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "d_topk_weights", frame.rets[1], DataType::F32,
                                {sizes.tokens, sizes.top_k}));
  params.d_weights = static_cast<const float*>(frame.args[3].data);
  params.d_topk_weights = static_cast<float*>(frame.rets[1].data);
  return call.Launched(cuda::LaunchCombine(call.stream, params));
}

}  // namespace ep_runtime
