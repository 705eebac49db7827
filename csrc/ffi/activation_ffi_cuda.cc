#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/driver.h"
#include "cuda/rows/activation.h"
#include "ffi/read_call.h"
#include "ffi/rows_ffi_cuda.h"
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

template <Status (*launch)(CallFrame, cudaStream_t, const ActivationAttributes&)>
ffi::Error Run(cudaStream_t stream, int64_t function, int64_t gated, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  CallFrame frame{};
  Status status = ReadFrame(args, rets, &frame);
  if (status.ok()) status = launch(std::move(frame), stream, {function, gated});
  return status.ok() ? ffi::Error::Success() : ToXla(status);
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

}  // namespace

XLA_FFI_Handler* const kActivationV1 = kForward;
XLA_FFI_Handler* const kActivationBwdV1 = kBackward;

}  // namespace ep_runtime
