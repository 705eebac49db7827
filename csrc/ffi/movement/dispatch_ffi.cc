#include "cpu/dispatch_kernels.h"
#include "ffi/call_frame.h"

namespace ep_runtime {
namespace {

using xla::ffi::DataType;

}  // namespace

// ep_dispatch_v1(rank, layer_index, tokens [T, H], weights f32 [T, K] or [0, 0], plan)
//   -> recv [C, H], recv_weights f32 [C]
Status CallDispatch(const CallFrame& frame, CallContext context) {
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 2));
  const Buffer& tokens = frame.args[2];
  const Buffer& weights = frame.args[3];
  DispatchParams params{};
  params.sizes = {tokens.dim(0), frame.args[4].dim(1), frame.rets[0].dim(0), frame.args[10].dim(0),
                  tokens.dim(1)};
  const Sizes& sizes = params.sizes;
  EP_RETURN_IF_ERROR(CheckShape(frame, "tokens", tokens, {sizes.tokens, sizes.width}));
  EP_RETURN_IF_ERROR(CheckSizes(frame, context, sizes, ElementBytes(tokens)));
  MutablePlan plan{};
  EP_RETURN_IF_ERROR(ReadPlan(frame, frame.args, 4, sizes, context.group->sizes().ep_size, &plan));
  if (weights.dims != Dims{0, 0}) {
    EP_RETURN_IF_ERROR(
        CheckArray(frame, "weights", weights, DataType::F32, {sizes.tokens, sizes.top_k}));
    // A rank without tokens has a null buffer, yet its peers' weights arrive.
    static const float kNoWeights[1] = {0.0f};
    params.weights = sizes.tokens > 0 ? static_cast<const float*>(weights.data) : kNoWeights;
  }
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "recv", frame.rets[0], tokens.dtype, {sizes.capacity, sizes.width}));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "recv_weights", frame.rets[1], DataType::F32, {sizes.capacity}));
  params.row_bytes = sizes.width * ElementBytes(tokens);
  params.tokens = tokens.data;
  params.plan = Const(plan);
  params.recv = frame.rets[0].data;
  params.recv_weights = static_cast<float*>(frame.rets[1].data);
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunDispatch(running, params); });
}

// ep_combine_bwd_v1(rank, layer_index, g [T, H], expert_out [C, H] or [0, 0],
//                   weights f32 [C] or [0], plan)
//   -> d_expert_out [C, H], d_weights f32 [C], or [0] without expert_out
Status CallCombineBwd(const CallFrame& frame, CallContext context) {
  EP_RETURN_IF_ERROR(CheckCount(frame, 5 + kPlanArrays, 2));
  const Buffer& grad = frame.args[2];
  const Buffer& expert_out = frame.args[3];
  const Buffer& weights = frame.args[4];
  CombineBwdParams params{};
  params.sizes = {grad.dim(0), frame.args[5].dim(1), frame.rets[0].dim(0), frame.args[11].dim(0),
                  grad.dim(1)};
  const Sizes& sizes = params.sizes;
  EP_RETURN_IF_ERROR(CheckShape(frame, "g", grad, {sizes.tokens, sizes.width}));
  EP_RETURN_IF_ERROR(ReadRowType(frame, "g", grad, &params.type));
  EP_RETURN_IF_ERROR(CheckSizes(frame, context, sizes, ElementBytes(grad)));
  MutablePlan plan{};
  EP_RETURN_IF_ERROR(ReadPlan(frame, frame.args, 5, sizes, context.group->sizes().ep_size, &plan));
  const bool with_weight_grads = expert_out.dims != Dims{0, 0};
  if (with_weight_grads) {
    EP_RETURN_IF_ERROR(
        CheckArray(frame, "expert_out", expert_out, grad.dtype, {sizes.capacity, sizes.width}));
    params.expert_out = expert_out.data;
  }
  if (weights.dims != Dims{0}) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", weights, DataType::F32, {sizes.capacity}));
    params.weights = static_cast<const float*>(weights.data);
  }
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "d_expert_out", frame.rets[0], grad.dtype, {sizes.capacity, sizes.width}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "d_weights", frame.rets[1], DataType::F32,
                                {with_weight_grads ? sizes.capacity : 0}));
  params.row_bytes = sizes.width * ElementBytes(grad);
  params.grad = grad.data;
  params.plan = Const(plan);
  params.d_expert_out = frame.rets[0].data;
  if (with_weight_grads) params.d_weights = static_cast<float*>(frame.rets[1].data);
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunCombineBwd(running, params); });
}

}  // namespace ep_runtime
