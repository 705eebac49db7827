#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "ffi/cuda_call.h"

namespace ep_runtime {
namespace {

using xla::ffi::DataType;

cuda::DispatchGrid GridOf(const CudaCall& call) {
  cuda::DispatchGrid grid;
  grid.push_blocks = call.group.blocks().push;
  grid.place_blocks = call.group.blocks().place;
  return grid;
}

// How rows of this type travel; rows of other types than f32, bf16 and f16 are bytes.
cuda::RowType TravelType(const Buffer& rows) {
  switch (rows.dtype) {
    case DataType::F32:
      return cuda::RowType::kF32;
    case DataType::BF16:
      return cuda::RowType::kBF16;
    case DataType::F16:
      return cuda::RowType::kF16;
    default:
      return cuda::RowType::kBytes;
  }
}

}  // namespace

// ep_dispatch_v1(rank, layer_index, tokens [T, H], weights f32 [T, K] or [0, 0], plan)
//   -> recv [C, H], recv_weights f32 [C]
Status LaunchDispatchCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 4 + kPlanArrays, 2));
  const Buffer& tokens = frame.args[2];
  const Buffer& weights = frame.args[3];
  const Sizes sizes = {tokens.dim(0), frame.args[4].dim(1), frame.rets[0].dim(0),
                       frame.args[10].dim(0), tokens.dim(1)};
  EP_RETURN_IF_ERROR(CheckShape(frame, "tokens", tokens, {sizes.tokens, sizes.width}));
  EP_RETURN_IF_ERROR(CheckSizes(frame, call.context, sizes, ElementBytes(tokens)));
  cuda::DispatchParams params{};
  EP_RETURN_IF_ERROR(call.RowBytes("tokens", tokens, sizes.width, &params.row_bytes));
  cuda::MutablePlan plan{};
  EP_RETURN_IF_ERROR(call.ReadPlan(frame.args, 4, sizes, &plan));
  if (weights.dims != Dims{0, 0}) {
    EP_RETURN_IF_ERROR(
        CheckArray(frame, "weights", weights, DataType::F32, {sizes.tokens, sizes.top_k}));
    params.weights = static_cast<const float*>(weights.data);
  }
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "recv", frame.rets[0], tokens.dtype, {sizes.capacity, sizes.width}));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "recv_weights", frame.rets[1], DataType::F32, {sizes.capacity}));
  params.group = call.rank.group;
  params.name = call.name;
  params.sizes = ToCuda(sizes);
  params.type = TravelType(tokens);
  params.tokens = tokens.data;
  params.plan = Const(plan);
  params.recv = frame.rets[0].data;
  params.recv_weights = static_cast<float*>(frame.rets[1].data);
  params.grid = GridOf(call);
  return call.Launched(cuda::LaunchDispatch(call.stream, params));
}

// ep_combine_bwd_v1(rank, layer_index, g [T, H], expert_out [C, H] or [0, 0],
//                   weights f32 [C] or [0], plan)
//   -> d_expert_out [C, H], d_weights f32 [C], or [0] without expert_out
Status LaunchCombineBwdCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 5 + kPlanArrays, 2));
  const Buffer& grad = frame.args[2];
  const Buffer& expert_out = frame.args[3];
  const Buffer& weights = frame.args[4];
  const Sizes sizes = {grad.dim(0), frame.args[5].dim(1), frame.rets[0].dim(0),
                       frame.args[11].dim(0), grad.dim(1)};
  cuda::CombineBwdParams params{};
  EP_RETURN_IF_ERROR(CheckShape(frame, "g", grad, {sizes.tokens, sizes.width}));
  EP_RETURN_IF_ERROR(call.SummedType("g", grad, &params.type));
  EP_RETURN_IF_ERROR(CheckSizes(frame, call.context, sizes, ElementBytes(grad)));
  EP_RETURN_IF_ERROR(call.RowBytes("g", grad, sizes.width, &params.row_bytes));
  cuda::MutablePlan plan{};
  EP_RETURN_IF_ERROR(call.ReadPlan(frame.args, 5, sizes, &plan));
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
  params.group = call.rank.group;
  params.name = call.name;
  params.sizes = ToCuda(sizes);
  params.grad = grad.data;
  params.plan = Const(plan);
  params.d_expert_out = frame.rets[0].data;
  params.clear_slack = call.clear_slack;
  if (with_weight_grads) params.d_weights = static_cast<float*>(frame.rets[1].data);
  params.grid = GridOf(call);
  return call.Launched(cuda::LaunchCombineBwd(call.stream, params));
}

}  // namespace ep_runtime
