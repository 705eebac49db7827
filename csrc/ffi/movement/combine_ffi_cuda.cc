// XLA targets of combine and dispatch's backward on GPUs.
#include "cuda/movement/combine/combine_kernels.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

Status LaunchWith(const CudaCall& call, cuda::CombineParams params) {
  params.group = call.rank.group;
  params.name = call.name;
  params.op = call.frame.op;
  params.precision = call.context.group->options().combine_precision;
  params.room = call.context.group->lane_layout().room;
  const cuda::LaunchBlocks& all = call.group.blocks();
  const cuda::ExchangeBlocks& blocks = all.OfTokens(params.sizes.tokens, all.combine);
  params.grid = {blocks.reduce, blocks.sum};
  return call.Launched(cuda::LaunchCombine(call.stream, params));
}

}  // namespace

Status LaunchCombineCall(const CudaCall& call) {
  cuda::CombineParams params{};
  EP_RETURN_IF_ERROR(ReadCombine(call, &params));
  return LaunchWith(call, params);
}

Status LaunchDispatchBwdCall(const CudaCall& call) {
  cuda::CombineParams params{};
  EP_RETURN_IF_ERROR(ReadDispatchBwd(call, &params));
  return LaunchWith(call, params);
}

}  // namespace ep_runtime
