#include "cpu/prepare_kernels.h"
#include "ffi/call_frame.h"

namespace ep_runtime {

// ep_prepare_v1(rank, layer_index, topk_idx [T, K]) -> the nine plan arrays.
Status CallPrepare(const CallFrame& frame, CallContext context) {
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, kPlanArrays));
  const Buffer& topk_idx = frame.args[2];
  PrepareParams params{};
  params.sizes = {topk_idx.dim(0), topk_idx.dim(1), frame.rets[4].dim(0), frame.rets[6].dim(0), 0};
  const Sizes& sizes = params.sizes;
  EP_RETURN_IF_ERROR(CheckArray(frame, "topk_idx", topk_idx, xla::ffi::DataType::S32,
                                {sizes.tokens, sizes.top_k}));
  EP_RETURN_IF_ERROR(CheckSizes(frame, context, sizes, /*element_bytes=*/0));
  EP_RETURN_IF_ERROR(
      ReadPlan(frame, frame.rets, 0, sizes, context.group->sizes().ep_size, &params.plan));
  params.topk_idx = static_cast<const int32_t*>(topk_idx.data);
  const bool error_on_overflow = context.group->options().error_on_overflow;
  Call call(std::move(context));
  EP_RETURN_IF_ERROR(call.Run([&](Call& running) { return RunPrepare(running, params); }));
  if (!error_on_overflow) return Status();
  return call.GatherVerdict(params.plan.num_recv[0], sizes.capacity);
}

}  // namespace ep_runtime
