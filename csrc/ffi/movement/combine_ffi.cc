// XLA targets of combine and dispatch's backward on CPU.
#include <utility>

#include "cpu/combine_kernels.h"
#include "ffi/cpu_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

Status RunWith(CallContext context, CombineParams params) {
  const int64_t wide_bytes = params.sizes.width * static_cast<int64_t>(sizeof(float));
  params.token_bytes = params.wide_tokens ? wide_bytes : params.row_bytes;
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunCombine(running, params); });
}

}  // namespace

Status CallCombine(const CallFrame& frame, CallContext context) {
  CombineParams params{};
  EP_RETURN_IF_ERROR(ReadCombine(CpuCall{frame, context}, &params));
  return RunWith(std::move(context), params);
}

Status CallDispatchBwd(const CallFrame& frame, CallContext context) {
  CombineParams params{};
  EP_RETURN_IF_ERROR(ReadDispatchBwd(CpuCall{frame, context}, &params));
  return RunWith(std::move(context), params);
}

}  // namespace ep_runtime
