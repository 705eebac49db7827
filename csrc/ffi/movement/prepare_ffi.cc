// XLA target of prepare on CPU.
#include <utility>

#include "cpu/prepare_kernels.h"
#include "ffi/cpu_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {

Status CallPrepare(const CallFrame& frame, CallContext context) {
  PrepareParams params{};
  EP_RETURN_IF_ERROR(ReadPrepare(CpuCall{frame, context}, &params));
  const bool error_on_overflow = context.group->options().error_on_overflow;
  Call call(std::move(context));
  EP_RETURN_IF_ERROR(call.Run([&](Call& running) { return RunPrepare(running, params); }));
  if (!error_on_overflow) return Status();
  return call.GatherVerdict(params.plan.num_recv[0], params.sizes.capacity);
}

}  // namespace ep_runtime
