#include "cuda/movement/prepare/check_indices.cuh"
#include "cuda/movement/prepare/count_slots.cuh"
#include "cuda/movement/prepare/exchange_entries.cuh"
#include "cuda/movement/prepare/gather_verdict.cuh"
#include "cuda/movement/prepare/lay_out_rows.cuh"
#include "cuda/movement/prepare/place_slots.cuh"
#include "cuda/movement/prepare/prepare_kernels.h"

namespace ep_runtime {
namespace cuda {
namespace prepare {
namespace {

// Sizes of this rank's zones, by the first warp of the first block.
__device__ void WriteSizes(const DeviceCall& call, const PrepareParams& params,
                           const Experts& experts) {
  const int first = call.me * params.sizes.experts;
  int64_t demand = 0;
  int32_t dropped = 0;
  for (int e = threadIdx.x; e < params.sizes.experts; e += 32) {
    const int32_t kept = experts.kept[first + e];
    dropped += experts.demand[first + e] - kept;
    params.plan.kept[e] = kept;
    params.plan.group_sizes[e] = UpTo(kept, params.alignment);
    demand += UpTo(experts.demand[first + e], params.alignment);
  }
  for (int step = 16; step > 0; step /= 2) demand += __shfl_xor_sync(~0u, demand, step);
  dropped = __reduce_add_sync(~0u, dropped);
  if (threadIdx.x == 0) {
    CountRows(call.group, BoardIndex(params.name), 0, dropped);
    params.plan.num_recv[0] = static_cast<int32_t>(min(demand, int64_t{INT32_MAX}));
  }
}

// False: the call failed on the way.
__device__ bool Route(const DeviceCall& call, const PrepareParams& params, const Experts& experts,
                      int num_experts, PrepareShared* shared) {
  const TokenRange range(params.sizes.tokens, blockIdx.x * kWarps + threadIdx.x / 32,
                         gridDim.x * kWarps);
  CountSlots(call, params, experts, num_experts, range);
  if (!MeetBlocks(call, 0, gridDim.x)) return false;
  SendCounts(call, experts, num_experts);
  if (!AwaitCounts(call)) return false;
  LayOutRows(call, params, experts, num_experts);
  PlaceSlots(call, params, experts, num_experts, range, shared);
  SumBlock(call, shared);
  if (!MeetBlocks(call, 1, gridDim.x)) return false;
  SumBlocks(call, shared);
  SendEntries(call, params, range, *shared);
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    WriteSizes(call, params, experts);
    if (params.verdict != nullptr) GatherVerdict(call, params, experts);
  }
  if (!AwaitEntries(call, params, shared)) return false;
  WriteReceived(call, params, *shared);
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    PrepareKernel(const __grid_constant__ PrepareParams params) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ PrepareShared shared;
  const DeviceCall call = BeginCall(params.group, params.name, OpCode::kPrepare);
  const int num_experts = params.num_experts;
  const Experts experts(dynamic, num_experts);
  if (!call.dead && params.group->bad_index != nullptr) CheckIndices(call, params, num_experts);
  if (!call.dead) Route(call, params, experts, num_experts, &shared);
  const MutablePlan& plan = params.plan;
  const int64_t slots = int64_t{params.sizes.tokens} * params.sizes.top_k * 4;
  const int64_t local = int64_t{params.sizes.experts} * 4;
  const Output outputs[] = {
      {plan.dst_rank, slots, 0},
      {plan.dst_row, slots, 0},
      {plan.recv_count, int64_t{call.ranks} * 16, 0},
      {plan.staged_start, (int64_t{call.ranks} * params.sizes.tokens + 1) * 4, 0},
      {plan.staged_row, int64_t{params.sizes.capacity} * 4, 0},
      {plan.staged_slot, int64_t{params.sizes.capacity} * 4, 0},
      {plan.kept, local, 0},
      {plan.group_sizes, local, 0},
      {plan.num_recv, 4, 0}};
  EndCall(call, outputs);
}

}  // namespace
}  // namespace prepare

cudaError_t LaunchPrepare(cudaStream_t stream, const PrepareParams& params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || sizes.experts < 1 ||
      params.num_experts > kMaxExperts || params.num_experts % sizes.experts != 0 ||
      params.alignment < 1 || params.blocks < 1 || params.blocks > kMaxPrepareBlocks) {
    return cudaErrorInvalidValue;
  }
  const int64_t block_tokens = (sizes.tokens + params.blocks - 1) / params.blocks;
  if (block_tokens * sizes.top_k > kMaxBlockSlots) return cudaErrorInvalidValue;
  const size_t shared_bytes = prepare::Experts::Bytes(params.num_experts);
  const cudaError_t error =
      cudaFuncSetAttribute(prepare::PrepareKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  prepare::PrepareKernel<<<params.blocks, prepare::kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
