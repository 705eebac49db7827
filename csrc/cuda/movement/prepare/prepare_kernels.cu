// prepare: decides which row of which rank every slot gets, and what each rank will receive.
//
// One kernel whose blocks are all resident. A warp owns whole tokens, in order. Rows are numbered
// by sums over earlier ranks, blocks and warps, so a plan is the same every time.
//
//   phase            who                   reads -> writes
//     TellCall       one more block        -> call lines, the board. Not in another block, because
//                                          its fences would wait for these stores to host memory
//   1 CountSlots     every warp            topk_idx -> the block's slots by expert: scratch
//     all blocks of this rank meet (barrier 0)
//   2 SendCounts     every block           scratch -> slots of earlier blocks: shared memory
//                    block 0               scratch -> this rank's count row: Counts(dest, me)
//     every block waits for CountsFlag(me, source) of all sources, this rank included
//   3 LayOutRows     every block, alike    Counts(me, source) -> rows that every expert keeps, or
//                                          its copies get, and where they begin: shared memory
//   4 PlaceSlots     every warp            topk_idx -> dst_rank, dst_row
//     SumBlock       every block           -> its entries and staged rows for each rank: scratch
//     all blocks of this rank meet (barrier 1)
//   5 SumBlocks      every block           scratch -> sums of earlier blocks: shared memory
//                    block 0               scratch -> totals, next to CountsFlag(dest, me); in a
//                                          packed call all totals, behind Counts(dest, me)
//     SendEntries    every warp            dst_rank, dst_row -> Entries(dest, me)
//     WriteSizes     block 0, last warp    -> kept, group_sizes, num_recv, experts of slots
//     GatherVerdict  block 0, last warp    -> verdict, with on_overflow="error": it waits for the
//                                          verdict lines of all ranks of the world
//     every block waits for EntriesFlag(me, source, block) of all sources' blocks
//   6 WriteReceived  all blocks, by rows   Entries(me, source), totals -> recv_count,
//                                          staged_start, staged_row, staged_slot
//
// F(dest, source) is in the window of `dest`, in the lane of this call, and only `source` writes
// it. All ranks run the same number of blocks, because a receiver waits for as many flags of a
// source as it has blocks itself.
//
// Memory order: the threads of a block store a flag's data and sync; then one thread stores the
// flag with release of system scope. The data are block 0's count row for CountsFlag, a block's
// entries for its EntriesFlag, and the totals for the EntriesFlag of block 0. A waiting thread
// acquires the flag and then syncs with its block, whose threads may all read then. Reads bypass
// the L1 cache (__ldcg), which may hold bytes of an earlier call.
//
// Waits cannot deadlock: nobody waits for a phase later than its own, on any rank. call.cuh
// explains the begin and end of a call, and why its lane is free. A failed call fills its outputs
// with zeros, and leaves slots for copies empty.

#include <algorithm>

#include "cuda/movement/prepare/check_indices.cuh"
#include "cuda/movement/prepare/count_slots.cuh"
#include "cuda/movement/prepare/exchange_entries.cuh"
#include "cuda/movement/prepare/gather_verdict.cuh"
#include "cuda/movement/prepare/lay_out_rows.cuh"
#include "cuda/movement/prepare/place_slots.cuh"
#include "cuda/movement/prepare/prepare_kernels.h"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace prepare {
namespace {

// Writes the sizes of this rank's zones. One warp of the first block calls this.
__device__ void WriteSizes(const DeviceCall& call, const PrepareParams& params,
                           const Experts& experts) {
  const int first = call.me * experts.local, lane = threadIdx.x % 32;
  int64_t demand = 0;
  int32_t dropped = 0;
  for (int e = lane; e < experts.local; e += 32) {
    dropped += experts.demand[first + e] - experts.kept[first + e];
    demand += UpTo(experts.demand[first + e], params.alignment);
  }
  for (int step = 16; step > 0; step /= 2) demand += __shfl_xor_sync(~0u, demand, step);
  dropped = __reduce_add_sync(~0u, dropped);
  const int32_t* rows = experts.rows + call.me * experts.physical();
  for (int e = lane; e < experts.physical(); e += 32) {
    params.plan.kept[e] = rows[e];
    params.plan.group_sizes[e] = UpTo(rows[e], params.row_alignment);
  }
  for (int slot = lane; slot < call.ranks * experts.spare; slot += 32) {
    params.spread.experts[slot] = experts.slots[slot];
  }
  CountLoad(call.group, params.name, params.sizes.tokens, experts.kept + first, experts.local);
  if (lane == 0) {
    CountRows(call.group, params.name, 0, dropped);
    params.plan.num_recv[0] = static_cast<int32_t>(min(demand, int64_t{INT32_MAX}));
  }
}

// Writes the number of rows of the fullest slab, which is the same on all ranks. One warp of the
// first block calls this.
__device__ void WriteMost(const DeviceCall& call, const PrepareParams& params,
                          const Experts& experts) {
  const int lane = threadIdx.x % 32;
  int32_t most = 0;
  for (int rank = 0; rank < call.ranks; ++rank) {
    int32_t rows = 0;
    for (int e = lane; e < experts.physical(); e += 32) {
      rows += UpTo(experts.rows[rank * experts.physical() + e], params.row_alignment);
    }
    most = max(most, static_cast<int32_t>(__reduce_add_sync(~0u, rows)));
  }
  if (lane == 0) *params.most = most;
}

// Runs all phases. Returns false if the call failed.
__device__ bool Route(const DeviceCall& call, const PrepareParams& params, const Experts& experts,
                      int num_experts, int columns, PrepareShared* shared) {
  const TokenRange range(params.sizes.tokens, blockIdx.x * kWarps + threadIdx.x / 32,
                         params.blocks * kWarps);
  CountSlots(call, params, experts, num_experts, range);
  if (!MeetBlocks(call, 0, params.blocks)) return false;
  SendCounts(call, params, experts, num_experts);
  if (!AwaitCounts(call)) return false;
  LayOutRows(call, params, experts, num_experts, &shared->spread);
  PlaceSlots(call, params, experts, num_experts, range, shared);
  const int32_t own = SumBlock(call, shared);
  if (!MeetBlocks(call, 1, params.blocks)) return false;
  SumBlocks(call, params.blocks, columns > 4, own, shared);
  SendEntries(call, params, range, *shared);
  if (blockIdx.x == 0 && threadIdx.x / 32 == kWarps - 1) {  // the first warp stores flags
    WriteSizes(call, params, experts);
    if (params.most != nullptr) WriteMost(call, params, experts);
    if (params.verdict != nullptr) GatherVerdict(call, params, experts);
  }
  if (!AwaitEntries(call, params, shared)) return false;
  WriteReceived(call, params, columns, *shared);
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    PrepareKernel(const __grid_constant__ PrepareParams params, int columns) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ PrepareShared shared;
  if (LeftOut(params.name.wanted)) return;
  const DeviceCall call = BeginCall(params.group, params.name, OpCode::kPrepare);
  const int num_experts = params.num_experts;
  const Experts experts(dynamic, params);
  if (!call.dead && params.group->bad_index != nullptr) CheckIndices(call, params, num_experts);
  if (!call.dead && static_cast<int>(blockIdx.x) < params.blocks) {
    Route(call, params, experts, num_experts, columns, &shared);
  } else if (!call.dead && threadIdx.x < 32) {
    TellCall(call, params.name);
  }
  const MutablePlan& plan = params.plan;
  const int64_t slots = int64_t{params.sizes.tokens} * params.sizes.top_k * 4;
  const int64_t local = int64_t{experts.physical()} * 4;
  const int64_t copies = int64_t{experts.ranks} * experts.spare * 4;
  const Output outputs[] = {
      {plan.dst_rank, slots, 0},
      {plan.dst_row, slots, 0},
      {plan.recv_count, int64_t{call.ranks} * columns * 4, 0},
      {plan.staged_start, (int64_t{call.ranks} * params.sizes.tokens + 1) * 4, 0},
      {plan.staged_row, int64_t{params.sizes.capacity} * 4, 0},
      {plan.staged_slot, int64_t{params.sizes.capacity} * 4, 0},
      {plan.kept, local, 0},
      {plan.group_sizes, local, 0},
      {plan.num_recv, 4, 0},
      {params.most, params.most != nullptr ? 4 : 0, 0},
      {params.spread.experts, copies, ~0u}};
  EndCall(call, outputs);
}

}  // namespace
}  // namespace prepare

cudaError_t LaunchPrepare(cudaStream_t stream, PrepareParams params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || sizes.experts < 1 ||
      params.num_experts % sizes.experts != 0 || params.spread.spare < 0 ||
      params.row_alignment < 1 || params.alignment < 1 ||
      params.alignment % params.row_alignment != 0 || params.blocks < 1 ||
      params.blocks > kMaxPrepareBlocks) {
    return cudaErrorInvalidValue;
  }
  const int32_t spread = params.num_experts / sizes.experts * params.spread.spare;
  if (params.num_experts + spread > kMaxExperts) return cudaErrorInvalidValue;
  // The number of blocks depends on static sizes only, so that it is the same on all ranks. A
  // single block waits for no others.
  constexpr int64_t kSlots =
      1024;  // slots of a block: a barrier of blocks takes as long as half of them
  const int64_t slots = int64_t{sizes.tokens} * sizes.top_k;
  const auto wanted = static_cast<int32_t>((slots + kSlots - 1) / kSlots);
  params.blocks = std::min(std::max(wanted, 1), params.blocks);
  const int64_t block_tokens = (sizes.tokens + params.blocks - 1) / params.blocks;
  if (block_tokens * sizes.top_k > kMaxBlockSlots) return cudaErrorInvalidValue;
  const size_t shared_bytes = prepare::Experts::Bytes(params.num_experts, spread);
  const cudaError_t error = AllowSharedBytes(prepare::PrepareKernel, shared_bytes);
  if (error != cudaSuccess) return error;
  const auto columns = static_cast<int>(params.room.CountColumns(sizes.tokens));
  prepare::PrepareKernel<<<params.blocks + 1, prepare::kThreads, shared_bytes, stream>>>(params,
                                                                                         columns);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
