// XLA targets of dispatch and combine's backward on GPUs.
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

template <typename Params>
void ReadCall(const CudaCall& call, Params* params) {
  params->group = call.rank.group;
  params->name = call.name;
  const cuda::LaunchBlocks& all = call.group.blocks();
  const cuda::ExchangeBlocks& blocks = all.OfTokens(params->sizes.tokens, all.beside);
  params->grid.push_blocks = blocks.push;
  params->grid.place_blocks = blocks.place;
  params->room = call.context.group->lane_layout().room;
}

}  // namespace

Status LaunchDispatchCall(const CudaCall& call) {
  cuda::DispatchParams params{};
  EP_RETURN_IF_ERROR(ReadDispatch(call, /*no_weights=*/nullptr, &params));
  ReadCall(call, &params);
  return call.Launched(cuda::LaunchDispatch(call.stream, params));
}

Status LaunchCombineBwdCall(const CudaCall& call) {
  cuda::CombineBwdParams params{};
  EP_RETURN_IF_ERROR(ReadCombineBwd(call, &params));
  ReadCall(call, &params);
  params.clear_slack = call.attributes.clear_slack;
  return call.Launched(cuda::LaunchCombineBwd(call.stream, params));
}

}  // namespace ep_runtime
