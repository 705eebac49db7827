// Defines custom calls that belong to no group. They need only operands, attributes and a stream.
#ifndef EP_RUNTIME_FFI_STREAM_CALL_H_
#define EP_RUNTIME_FFI_STREAM_CALL_H_

#include <cuda_runtime.h>

#include "cuda/device/driver.h"
#include "ffi/call_frame.h"
#include "ffi/read_call.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

template <typename... Attributes>
auto OnStream(const char* call,
              Status (*launch)(const CallFrame&, cudaStream_t, Attributes... attributes)) {
  return [call, launch](cudaStream_t stream, Attributes... attributes, xla::ffi::RemainingArgs args,
                        xla::ffi::RemainingRets rets) {
    CallFrame frame{call, OpCode::kNone, {}, {}};
    return Answer(args, rets, &frame, [&] { return launch(frame, stream, attributes...); });
  };
}

// Defines the handler `symbol` of the target `call`. `launch` takes the attributes named after it,
// in their order. `launch` must neither allocate nor synchronise.
#define EP_RUNTIME_STREAM_CALL(symbol, call, launch, ...)                     \
  XLA_FFI_DEFINE_HANDLER(symbol##Handler, OnStream(call, launch),             \
                         ::xla::ffi::Ffi::Bind()                              \
                             .Ctx<::xla::ffi::PlatformStream<cudaStream_t>>() \
                                 __VA_ARGS__.RemainingArgs()                  \
                             .RemainingRets(),                                \
                         {::xla::ffi::Traits::kCmdBufferCompatible});         \
  XLA_FFI_Handler* const symbol = symbol##Handler

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_STREAM_CALL_H_
