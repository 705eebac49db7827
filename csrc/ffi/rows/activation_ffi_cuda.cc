#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/rows/activation.h"
#include "cuda/rows/activation_quantize.h"
#include "ffi/read_call.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using cuda::ActivationParams;
using ffi::DataType;

struct ActivationAttributes {
  int64_t function;  // cuda::ActivationFunction
  int64_t gated;
};

// hidden [S * C, M] or gated [S * C, 2 * M], row_weights f32 [S * C] or [0].
Status ReadOperands(const CallFrame& frame, const ActivationAttributes& attributes,
                    const Buffer& inner, const Buffer& weights, ActivationParams* params) {
  const Buffer& hidden = frame.args[1];
  EP_RETURN_IF_ERROR(ReadRowGroups(frame, frame.args[0], "hidden", hidden, &params->groups));
  EP_RETURN_IF_ERROR(ReadFloatRows(frame, "hidden", hidden, &params->type));
  params->function = static_cast<cuda::ActivationFunction>(attributes.function);
  params->gated = attributes.gated != 0;
  const int64_t rows = hidden.dim(0), width = hidden.dim(1) / (params->gated ? 2 : 1);
  EP_RETURN_IF_ERROR(
      CheckShape(frame, "hidden", hidden, {rows, params->gated ? 2 * width : width}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "rows of M", inner, hidden.dtype, {rows, width}));
  params->width = static_cast<int32_t>(width);
  params->hidden = hidden.data;
  if (weights.dims == Dims{0}) return CheckType(frame, "row_weights", weights, DataType::F32);
  EP_RETURN_IF_ERROR(CheckArray(frame, "row_weights", weights, DataType::F32, {rows}));
  params->weights = static_cast<const float*>(weights.data);
  return Status();
}

// ep_activation_v1(group_sizes s32 [S, L], hidden, row_weights; function, gated) -> [S * C, M]
Status LaunchForward(CallFrame frame, cudaStream_t stream, const ActivationAttributes& attributes) {
  frame.call = "ep_activation_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  ActivationParams params{};
  EP_RETURN_IF_ERROR(ReadOperands(frame, attributes, frame.rets[0], frame.args[2], &params));
  params.out = frame.rets[0].data;
  return cuda::Check(cuda::LaunchActivation(stream, params), frame.call);
}

// ep_activation_bwd_v1(group_sizes s32 [S, L], hidden, row_weights, grad [S * C, M]; function,
//                      gated) -> like hidden and maybe its memory, like row_weights
Status LaunchBackward(CallFrame frame, cudaStream_t stream,
                      const ActivationAttributes& attributes) {
  frame.call = "ep_activation_bwd_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 4, 2));
  ActivationParams params{};
  EP_RETURN_IF_ERROR(ReadOperands(frame, attributes, frame.args[3], frame.args[2], &params));
  const Buffer& hidden = frame.args[1];
  EP_RETURN_IF_ERROR(CheckArray(frame, "d_hidden", frame.rets[0], hidden.dtype, hidden.dims));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "d_weights", frame.rets[1], DataType::F32, frame.args[2].dims));
  params.grad = frame.args[3].data;
  params.out = frame.rets[0].data;
  if (params.weights != nullptr) params.d_weights = static_cast<float*>(frame.rets[1].data);
  return cuda::Check(cuda::LaunchActivation(stream, params), frame.call);
}

struct QuantizedActivationAttributes {
  int64_t format;  // cuda::Fp8Format
  int64_t power_of_two;
};

// As above; grad [S * C, M], or [0, 0] for values. `wide` is W of what is quantized.
Status ReadQuantized(const CallFrame& frame, const ActivationAttributes& attributes,
                     cuda::QuantizedActivationParams* params, int64_t* wide) {
  const Buffer& hidden = frame.args[1];
  const Buffer& grad = frame.args[3];
  const bool backward = grad.dims != Dims{0, 0};
  Buffer inner = grad;
  if (!backward) inner.dims = {hidden.dim(0), hidden.dim(1) / (attributes.gated != 0 ? 2 : 1)};
  ActivationParams read{};
  EP_RETURN_IF_ERROR(ReadOperands(frame, attributes, inner, frame.args[2], &read));
  params->function = read.function;
  params->type = read.type;
  params->gated = read.gated;
  params->groups = read.groups;
  params->width = read.width;
  params->hidden = read.hidden;
  params->weights = read.weights;
  params->grad = backward ? grad.data : nullptr;
  *wide = backward ? hidden.dim(1) : read.width;
  return Status();
}

// ep_activation_amax_v1(group_sizes s32 [S, L], hidden, row_weights, grad; function, gated)
//   -> f32 [G]
Status LaunchAmax(CallFrame frame, cudaStream_t stream, const ActivationAttributes& attributes) {
  frame.call = "ep_activation_amax_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 4, 1));
  cuda::QuantizedActivationParams params{};
  int64_t wide = 0;
  EP_RETURN_IF_ERROR(ReadQuantized(frame, attributes, &params, &wide));
  const Buffer& amax = frame.rets[0];
  EP_RETURN_IF_ERROR(CheckArray(frame, "amax", amax, DataType::F32, {amax.dim(0)}));
  params.num_experts = static_cast<int32_t>(amax.dim(0));
  params.amax = static_cast<float*>(amax.data);
  return cuda::Check(cuda::LaunchQuantizedActivation(stream, params), frame.call);
}

// ep_quantize_activation_v1(group_sizes s32 [S, L], hidden, row_weights, grad,
//                           scale f32 [S * L] or [0]; function, gated, format, power_of_two)
//   -> data u8 [S * C, W], scale f32 [S * C, ceil(M / 128) * (W / M)] or [0, 0],
//      gradients of row_weights, [0] without grad
Status LaunchQuantize(CallFrame frame, cudaStream_t stream, const ActivationAttributes& attributes,
                      const QuantizedActivationAttributes& how) {
  frame.call = "ep_quantize_activation_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 5, 3));
  cuda::QuantizedActivationParams params{};
  int64_t wide = 0;
  EP_RETURN_IF_ERROR(ReadQuantized(frame, attributes, &params, &wide));
  const Buffer& scale = frame.args[4];
  const bool tiled = scale.dims == Dims{0}, backward = params.grad != nullptr;
  const int64_t rows = frame.args[1].dim(0);
  const int64_t groups =
      static_cast<int64_t>(params.groups.num_slabs) * params.groups.groups_per_slab;
  const int64_t tiles = (params.width + cuda::kTile - 1) / cuda::kTile * (wide / params.width);
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "scale", scale, DataType::F32, tiled ? Dims{0} : Dims{groups}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "data", frame.rets[0], DataType::U8, {rows, wide}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "tile scale", frame.rets[1], DataType::F32,
                                tiled ? Dims{rows, tiles} : Dims{0, 0}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "d_weights", frame.rets[2], DataType::F32,
                                backward ? frame.args[2].dims : Dims{0}));
  params.format = how.format == 0 ? cuda::Fp8Format::kE4M3 : cuda::Fp8Format::kE5M2;
  params.power_of_two = how.power_of_two != 0;
  params.group_scale = tiled ? nullptr : static_cast<const float*>(scale.data);
  params.data = static_cast<uint8_t*>(frame.rets[0].data);
  params.tile_scale = tiled ? static_cast<float*>(frame.rets[1].data) : nullptr;
  if (backward && params.weights != nullptr) {
    params.d_weights = static_cast<float*>(frame.rets[2].data);
  }
  return cuda::Check(cuda::LaunchQuantizedActivation(stream, params), frame.call);
}

ffi::Error RunQuantize(cudaStream_t stream, int64_t function, int64_t gated, int64_t format,
                       int64_t power_of_two, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) {
    return LaunchQuantize(std::move(frame), stream, {function, gated}, {format, power_of_two});
  });
}

template <Status (*launch)(CallFrame, cudaStream_t, const ActivationAttributes&)>
ffi::Error Run(cudaStream_t stream, int64_t function, int64_t gated, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) {
    return launch(std::move(frame), stream, {function, gated});
  });
}

#define EP_RUNTIME_BINDING                      \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Attr<int64_t>("function")                \
      .Attr<int64_t>("gated")                   \
      .RemainingArgs()                          \
      .RemainingRets()
XLA_FFI_DEFINE_HANDLER(kForward, Run<LaunchForward>, EP_RUNTIME_BINDING,
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, Run<LaunchBackward>, EP_RUNTIME_BINDING,
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAmax, Run<LaunchAmax>, EP_RUNTIME_BINDING,
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantize, RunQuantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("function")
                           .Attr<int64_t>("gated")
                           .Attr<int64_t>("format")
                           .Attr<int64_t>("power_of_two")
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kActivationV1 = kForward;
XLA_FFI_Handler* const kActivationBwdV1 = kBackward;
XLA_FFI_Handler* const kActivationAmaxV1 = kAmax;
XLA_FFI_Handler* const kQuantizeActivationV1 = kQuantize;

}  // namespace ep_runtime
