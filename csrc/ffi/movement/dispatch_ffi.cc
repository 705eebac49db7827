// XLA targets of dispatch and combine's backward on CPU.
#include <utility>

#include "cpu/dispatch_kernels.h"
#include "ffi/cpu_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {

Status CallDispatch(const CallFrame& frame, CallContext context) {
  static constexpr float kNoWeights[1] = {0.0f};
  DispatchParams params{};
  EP_RETURN_IF_ERROR(ReadDispatch(CpuCall{frame, context}, kNoWeights, &params));
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunDispatch(running, params); });
}

Status CallCombineBwd(const CallFrame& frame, CallContext context) {
  CombineBwdParams params{};
  EP_RETURN_IF_ERROR(ReadCombineBwd(CpuCall{frame, context}, &params));
  Call call(std::move(context));
  return call.Run([&](Call& running) { return RunCombineBwd(running, params); });
}

}  // namespace ep_runtime
