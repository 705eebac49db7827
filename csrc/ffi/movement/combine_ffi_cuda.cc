#include "cuda/movement/combine/combine_kernels.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

// What is sent in 8 bits takes arithmetic, so that more SMs win more than with other sums.
const cuda::ExchangeBlocks& BlocksOf(const CudaCall& call, CombinePrecision precision) {
  const cuda::LaunchBlocks& blocks = call.group.blocks();
  return precision == CombinePrecision::kFp8 ? blocks.alone : blocks.beside;
}

Status LaunchWith(const CudaCall& call, cuda::CombineParams params) {
  params.group = call.rank.group;
  params.name = call.name;
  params.op = call.frame.op;
  params.precision = call.context.group->options().combine_precision;
  params.room = call.context.group->lane_layout().room;
  const cuda::ExchangeBlocks& blocks = BlocksOf(call, params.precision);
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
