// XLA targets of prepare on GPUs.

#include "core/base/layer_index.h"
#include "core/groups/registry.h"
#include "cuda/movement/prepare/prepare_kernels.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

// Waits for the verdict of all ranks. Every rank returns the same status.
Status ReadVerdict(const CudaCall& call) {
  EP_RETURN_IF_ERROR(call.Launched(cudaStreamSynchronize(call.stream)));
  const volatile cuda::DeviceVerdict& verdict = *call.rank.verdict;
  if (call.rank.record->valid != 0 || verdict.rank < 0) return Status();
  int32_t index = 0;  // layer in a stack; only the device knows it
  if (call.name.layer_index != nullptr) {
    const cudaError_t copied =
        cudaMemcpy(&index, call.name.layer_index, sizeof(index), cudaMemcpyDeviceToHost);
    EP_RETURN_IF_ERROR(call.Launched(copied));
  }
  const uint64_t layer_id = call.name.layer_id + static_cast<uint64_t>(ReadLayerIndex(index).layer);
  return OverflowError(ThisProcess().registry.LayerName(layer_id), verdict.rank, verdict.demand,
                       verdict.capacity);
}

}  // namespace

Status LaunchPrepareCall(const CudaCall& call) {
  const GroupOptions& options = call.context.group->options();
  cuda::PrepareParams params{};
  // For block calls there is a tenth result: the number of rows in the fullest slab.
  const size_t more = call.frame.rets.size() > kPlanArrays ? 1 : 0;
  EP_RETURN_IF_ERROR(ReadPrepare(call, &params, more));
  if (more != 0) {
    const Operand most(call.frame.call, "most", call.frame.rets[kPlanArrays]);
    EP_RETURN_IF_ERROR(most.Read({1}, &params.most));
  }
  params.group = call.rank.group;
  params.name = call.name;
  params.num_experts = static_cast<int32_t>(params.sizes.experts * options.sizes.ep_size);
  params.spread = params.sizes.experts != options.sizes.experts_per_rank();
  params.alignment = static_cast<int32_t>(call.context.layer.alignment);
  params.row_alignment = static_cast<int32_t>(call.context.row_alignment);
  params.blocks = call.group.blocks().prepare;
  params.room = call.context.group->lane_layout().room;
  if (!options.error_on_overflow || params.spread) {
    return call.Launched(cuda::LaunchPrepare(call.stream, params));
  }
  params.verdict = call.rank.verdict;
  *call.rank.verdict = {-1, 0, 0};
  EP_RETURN_IF_ERROR(call.Launched(cuda::LaunchPrepare(call.stream, params)));
  return ReadVerdict(call);
}

}  // namespace ep_runtime
