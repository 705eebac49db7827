// XLA targets of prepare on GPUs.
#include <algorithm>
#include <string>
#include <vector>

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

// Reads the experts of slots, the eleventh result of a call with slots for copies. Its plan then is
// of physical experts.
Status ReadSlots(const CudaCall& call, const Operand& experts, cuda::PrepareParams* params) {
  const GroupSizes& sizes = call.context.group->sizes();
  EP_RETURN_IF_ERROR(experts.Read({sizes.ep_size, sizes.spare_experts}, &params->spread.experts));
  params->spread.spare = static_cast<int32_t>(sizes.spare_experts);
  params->spread.most_kept = static_cast<int32_t>(call.attributes.rows);
  if (call.attributes.rows >= 0 && call.attributes.rows <= sizes.recv_capacity_per_rank) {
    return Status();
  }
  return Refused(call.frame.call, "rows",
                 "rows must be at most the group's recv_capacity_per_rank=" +
                     std::to_string(sizes.recv_capacity_per_rank) + ", got " +
                     std::to_string(call.attributes.rows));
}

}  // namespace

Status LaunchPrepareCall(const CudaCall& call) {
  const GroupOptions& options = call.context.group->options();
  cuda::PrepareParams params{};
  const std::vector<Buffer>& rets = call.frame.rets;
  const size_t more =
      rets.size() > kPlanArrays ? std::min<size_t>(rets.size() - kPlanArrays, 2) : 0;
  EP_RETURN_IF_ERROR(ReadPrepare(call, &params, more));
  if (more > 0) {
    const Operand most(call.frame.call, "most", rets[kPlanArrays]);
    EP_RETURN_IF_ERROR(most.Read({1}, &params.most));
  }
  if (more > 1) {
    const Operand experts(call.frame.call, "experts", rets[kPlanArrays + 1]);
    EP_RETURN_IF_ERROR(ReadSlots(call, experts, &params));
  }
  const int64_t local = options.sizes.experts_per_rank();
  const Operand kept = PlanAt(call.frame, rets, 0).kept;
  EP_RETURN_IF_ERROR(kept.CheckShape({local + params.spread.spare}));
  params.sizes.experts = static_cast<int32_t>(local);
  params.group = call.rank.group;
  params.name = call.name;
  params.num_experts = static_cast<int32_t>(options.sizes.num_experts);
  params.alignment = static_cast<int32_t>(call.context.layer.alignment);
  params.row_alignment = static_cast<int32_t>(call.context.row_alignment);
  params.blocks = call.group.blocks().prepare;
  params.room = call.context.group->lane_layout().room;
  if (!options.error_on_overflow) {
    return call.Launched(cuda::LaunchPrepare(call.stream, params));
  }
  params.verdict = call.rank.verdict;
  *call.rank.verdict = {-1, 0, 0};
  EP_RETURN_IF_ERROR(call.Launched(cuda::LaunchPrepare(call.stream, params)));
  return ReadVerdict(call);
}

}  // namespace ep_runtime
