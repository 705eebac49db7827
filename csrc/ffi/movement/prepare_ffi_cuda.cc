#include <string>

#include "cuda/movement/prepare/prepare_kernels.h"
#include "ffi/cuda_call.h"

namespace ep_runtime {
namespace {

// Waits for the verdict of all ranks; every one of them returns the same.
Status ReadVerdict(const CudaCall& call) {
  EP_RETURN_IF_ERROR(call.Launched(cudaStreamSynchronize(call.stream)));
  const volatile cuda::DeviceVerdict& verdict = *call.rank.verdict;
  if (call.rank.record->valid != 0 || verdict.rank < 0) return Status();
  const std::string& layer = call.context.layer.name;
  return OverflowError(layer, verdict.rank, verdict.demand, verdict.capacity);
}

}  // namespace

// ep_prepare_v1(rank, layer_index, topk_idx [T, K]) -> the nine plan arrays.
Status LaunchPrepareCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, kPlanArrays));
  const Buffer& topk_idx = frame.args[2];
  const Sizes sizes = {topk_idx.dim(0), topk_idx.dim(1), frame.rets[4].dim(0), frame.rets[6].dim(0),
                       0};
  EP_RETURN_IF_ERROR(CheckArray(frame, "topk_idx", topk_idx, xla::ffi::DataType::S32,
                                {sizes.tokens, sizes.top_k}));
  EP_RETURN_IF_ERROR(CheckSizes(frame, call.context, sizes, /*element_bytes=*/0));
  const GroupOptions& options = call.context.group->options();
  cuda::PrepareParams params{};
  EP_RETURN_IF_ERROR(call.ReadPlan(frame.rets, 0, sizes, &params.plan));
  params.group = call.rank.group;
  params.name = call.name;
  params.sizes = ToCuda(sizes);
  params.num_experts = static_cast<int32_t>(options.sizes.num_experts);
  params.alignment = static_cast<int32_t>(call.context.layer.alignment);
  params.topk_idx = static_cast<const int32_t*>(topk_idx.data);
  params.blocks = call.group.blocks().prepare;
  if (!options.error_on_overflow) {
    return call.Launched(cuda::LaunchPrepare(call.stream, params));
  }
  params.verdict = call.rank.verdict;
  *call.rank.verdict = {-1, 0, 0};
  EP_RETURN_IF_ERROR(call.Launched(cuda::LaunchPrepare(call.stream, params)));
  return ReadVerdict(call);
}

}  // namespace ep_runtime
