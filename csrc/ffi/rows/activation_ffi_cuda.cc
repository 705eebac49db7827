// XLA targets of activations.
#include <cstdint>

#include "cuda/rows/activation.h"
#include "cuda/rows/activation_quantize.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

using cuda::ActivationParams;
using xla::ffi::DataType;

// Reads hidden [S * C, M], or [S * C, 2 * M] if gated. `inner` becomes [S * C, M].
template <typename Params>
Status ReadHidden(const Operand& group_sizes, const Operand& hidden, int64_t function,
                  int64_t gated, Params* params, Dims* inner) {
  EP_RETURN_IF_ERROR(ReadRowGroups(group_sizes, hidden, &params->groups));
  EP_RETURN_IF_ERROR(hidden.ReadFloatType(&params->type));
  params->function = static_cast<cuda::ActivationFunction>(function);
  params->gated = gated != 0;
  const int64_t rows = hidden.dim(0), width = hidden.dim(1) / (params->gated ? 2 : 1);
  params->width = static_cast<int32_t>(width);
  *inner = {rows, width};
  return hidden.Read(hidden.type(), {rows, params->gated ? 2 * width : width}, &params->hidden);
}

// Reads weights, f32 [S * C] or [0].
template <typename Params>
Status ReadWeights(const Operand& weights, int64_t rows, Params* params) {
  EP_RETURN_IF_ERROR(weights.CheckType(DataType::F32));
  return weights.ReadIfGiven({rows}, &params->weights);
}

// ep_activation_v1(group_sizes s32 [S, L], hidden, row_weights; function, gated) -> [S * C, M]
Status LaunchForward(const CallFrame& frame, cudaStream_t stream, int64_t function, int64_t gated) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 1));
  const auto [group_sizes, hidden, weights] = frame.Args("group_sizes", "hidden", "row_weights");
  const auto [out] = frame.Rets("rows of M");
  ActivationParams params{};
  Dims inner;
  EP_RETURN_IF_ERROR(ReadHidden(group_sizes, hidden, function, gated, &params, &inner));
  EP_RETURN_IF_ERROR(out.Read(hidden.type(), inner, &params.out));
  EP_RETURN_IF_ERROR(ReadWeights(weights, inner[0], &params));
  return cuda::Check(cuda::LaunchActivation(stream, params), frame.call);
}

// ep_activation_bwd_v1(group_sizes s32 [S, L], hidden, row_weights, grad [S * C, M]; function,
//                      gated) -> d_hidden like hidden, maybe in its memory; d_weights like
//                      row_weights
Status LaunchBackward(const CallFrame& frame, cudaStream_t stream, int64_t function,
                      int64_t gated) {
  EP_RETURN_IF_ERROR(frame.CheckCount(4, 2));
  const auto [group_sizes, hidden, weights, grad] =
      frame.Args("group_sizes", "hidden", "row_weights", "rows of M");
  const auto [d_hidden, d_weights] = frame.Rets("d_hidden", "d_weights");
  ActivationParams params{};
  Dims inner;
  EP_RETURN_IF_ERROR(ReadHidden(group_sizes, hidden, function, gated, &params, &inner));
  EP_RETURN_IF_ERROR(grad.Read(hidden.type(), inner, &params.grad));
  EP_RETURN_IF_ERROR(ReadWeights(weights, inner[0], &params));
  EP_RETURN_IF_ERROR(d_hidden.Read(hidden.type(), hidden.dims(), &params.out));
  EP_RETURN_IF_ERROR(d_weights.ReadIf(!weights.absent(1), {inner[0]}, &params.d_weights));
  return cuda::Check(cuda::LaunchActivation(stream, params), frame.call);
}

// Reads operands like those of ep_activation_bwd_v1; grad is [S * C, M], or [0, 0] to quantize
// values.
Status ReadQuantized(const CallFrame& frame, int64_t function, int64_t gated,
                     cuda::QuantizedActivationParams* params) {
  const auto [group_sizes, hidden, weights, grad] =
      frame.Args("group_sizes", "hidden", "row_weights", "rows of M");
  Dims inner;
  EP_RETURN_IF_ERROR(ReadHidden(group_sizes, hidden, function, gated, params, &inner));
  EP_RETURN_IF_ERROR(grad.CheckType(hidden.type()));
  if (!grad.absent(2)) EP_RETURN_IF_ERROR(grad.Read(hidden.type(), inner, &params->grad));
  return ReadWeights(weights, inner[0], params);
}

// ep_activation_amax_v1(group_sizes s32 [S, L], hidden, row_weights, grad; function, gated)
//   -> f32 [G]
Status LaunchAmax(const CallFrame& frame, cudaStream_t stream, int64_t function, int64_t gated) {
  EP_RETURN_IF_ERROR(frame.CheckCount(4, 1));
  const auto [amax] = frame.Rets("amax");
  cuda::QuantizedActivationParams params{};
  EP_RETURN_IF_ERROR(ReadQuantized(frame, function, gated, &params));
  EP_RETURN_IF_ERROR(amax.Read({amax.dim(0)}, &params.amax));
  params.num_experts = static_cast<int32_t>(amax.dim(0));
  return cuda::Check(cuda::LaunchQuantizedActivation(stream, params), frame.call);
}

// ep_quantize_activation_v1(group_sizes s32 [S, L], hidden, row_weights, grad,
//                           scale f32 [S * L] or [0]; function, gated, format, power_of_two)
//   -> data u8 [S * C, W], scale f32 [S * C, ceil(M / 128) * (W / M)] or [0, 0],
//      gradients of row_weights, [0] without grad
Status LaunchQuantize(const CallFrame& frame, cudaStream_t stream, int64_t function, int64_t gated,
                      int64_t format, int64_t power_of_two) {
  EP_RETURN_IF_ERROR(frame.CheckCount(5, 3));
  const auto [group_sizes, hidden, weights, grad, scale] =
      frame.Args("group_sizes", "hidden", "row_weights", "rows of M", "scale");
  const auto [data, tile_scale, d_weights] = frame.Rets("data", "tile scale", "d_weights");
  cuda::QuantizedActivationParams params{};
  EP_RETURN_IF_ERROR(ReadQuantized(frame, function, gated, &params));
  const bool tiled = scale.absent(1), backward = !grad.absent(2);
  const int64_t rows = hidden.dim(0), halves = backward && params.gated ? 2 : 1;
  const int64_t groups = int64_t{params.groups.num_slabs} * params.groups.groups_per_slab;
  const int64_t tiles = (params.width + cuda::kTile - 1) / cuda::kTile * halves;
  EP_RETURN_IF_ERROR(scale.ReadIf(!tiled, {groups}, &params.group_scale));
  EP_RETURN_IF_ERROR(data.Read({rows, params.width * halves}, &params.data));
  EP_RETURN_IF_ERROR(tile_scale.ReadIf(tiled, {rows, tiles}, &params.tile_scale));
  EP_RETURN_IF_ERROR(d_weights.ReadIf(backward && !weights.absent(1), {rows}, &params.d_weights));
  params.format = format == 0 ? cuda::Fp8Format::kE4M3 : cuda::Fp8Format::kE5M2;
  params.power_of_two = power_of_two != 0;
  return cuda::Check(cuda::LaunchQuantizedActivation(stream, params), frame.call);
}

}  // namespace

#define EP_RUNTIME_ACTIVATION .Attr<int64_t>("function").Attr<int64_t>("gated")

EP_RUNTIME_STREAM_CALL(kActivationV1, "ep_activation_v1", LaunchForward, EP_RUNTIME_ACTIVATION);
EP_RUNTIME_STREAM_CALL(kActivationBwdV1, "ep_activation_bwd_v1", LaunchBackward,
                       EP_RUNTIME_ACTIVATION);
EP_RUNTIME_STREAM_CALL(kActivationAmaxV1, "ep_activation_amax_v1", LaunchAmax,
                       EP_RUNTIME_ACTIVATION);
EP_RUNTIME_STREAM_CALL(kQuantizeActivationV1, "ep_quantize_activation_v1", LaunchQuantize,
                       EP_RUNTIME_ACTIVATION.Attr<int64_t>("format").Attr<int64_t>("power_of_two"));

}  // namespace ep_runtime
