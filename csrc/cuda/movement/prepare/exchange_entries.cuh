// Phases 5 and 6 of prepare: sends one entry per kept row to the rank that gets the row.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXCHANGE_ENTRIES_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXCHANGE_ENTRIES_CUH_

#include "cuda/movement/prepare/lay_out_rows.cuh"
#include "cuda/movement/prepare/place_slots.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

// An entry in the format that is sent: 8 bytes, because the window has 8 bytes for each slot.
struct SentEntry {
  int32_t row;
  uint32_t staged;  // staged row's number * 64 + 32 if this is its first entry + slot
};
static_assert(sizeof(SentEntry) == sizeof(uint2), "stored at once");

// Sends the entries of the warp's slots, token by token, to the ranks that get the rows.
__device__ inline void SendEntries(const DeviceCall& call, const PrepareParams& params,
                                   const TokenRange& range, const PrepareShared& shared) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int top_k = params.sizes.top_k;
  // Lane r counts entries and staged rows for rank r. An iteration sends 32 / top_k whole tokens.
  int32_t next_entry = shared.block_entries[lane] + shared.warp_counts[warp][lane];
  int32_t next_staged = shared.block_staged[lane] + shared.warp_staged[warp][lane];
  const int step = 32 / top_k;
  for (int token = range.begin; token < range.end; token += step) {
    const int which = lane / top_k;
    const int slot = lane % top_k;
    const bool real = which < step && token + which < range.end;
    const int64_t at = int64_t{token + which} * top_k + slot;
    const int32_t rank = real ? __ldcg(&params.plan.dst_rank[at]) : -1;
    const int32_t row = real ? __ldcg(&params.plan.dst_row[at]) : -1;
    const uint32_t same = __match_any_sync(~0u, rank);
    const uint32_t earlier = same & ((1u << lane) - 1);
    // The lowest lane of each (token, rank) is the staged row's first entry.
    const uint32_t of_token = (top_k == 32 ? ~0u : (1u << top_k) - 1) << (which * top_k & 31);
    const bool first = rank >= 0 && (earlier & of_token) == 0;
    const uint32_t firsts = __ballot_sync(~0u, first) & same;
    const int32_t entry = __shfl_sync(~0u, next_entry, rank & 31) + __popc(earlier);
    const int32_t staged =
        __shfl_sync(~0u, next_staged, rank & 31) + __popc(firsts & ((2u << lane) - 1)) - 1;
    if (rank >= 0) {
      const SentEntry sent{row, static_cast<uint32_t>(staged) << 6 | (first ? 32u : 0u) |
                                    static_cast<uint32_t>(slot)};
      auto* entries = reinterpret_cast<uint2*>(call.Entries(rank, call.me));
      entries[entry] = make_uint2(static_cast<uint32_t>(sent.row), sent.staged);
    }
    for (int r = 0; r < call.ranks; ++r) {
      const uint32_t of_rank = __ballot_sync(~0u, rank == r);
      const uint32_t starts = __ballot_sync(~0u, first && rank == r);
      if (lane == r) {
        next_entry += __popc(of_rank);
        next_staged += __popc(starts);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < call.ranks) {
    StoreReleaseSys(call.EntriesFlag(threadIdx.x, call.me, blockIdx.x), call.tag);
  }
}

// Waits for all entries of all sources, then reads how many each sent. Words that a peer wrote are
// clamped to possible values, because they become offsets into arrays.
__device__ inline bool AwaitEntries(const DeviceCall& call, const PrepareParams& params,
                                    PrepareShared* shared) {
  bool alive = true;
  const int flags = call.ranks * params.blocks;
  for (int i = threadIdx.x; i < flags && alive; i += kThreads) {
    const int source = i / params.blocks;
    alive = AwaitWord(call, call.EntriesFlag(call.me, source, i % params.blocks), call.tag, source);
  }
  if (!__syncthreads_and(alive)) return false;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int32_t row[3] = {0, 0, 0};
    if (lane < call.ranks) {
      const auto* sent = reinterpret_cast<const int32_t*>(call.CountsFlag(call.me, lane)) + 4;
      for (int i = 0; i < 3; ++i) {
        const int32_t most = params.sizes.tokens * (i == 1 ? params.sizes.top_k : 1);
        row[i] = min(max(__ldcg(&sent[i]), 0), most);
      }
    }
    for (int i = 0; i < 3; ++i) shared->received[lane][i] = row[i];
    shared->staged_before[lane + 1] = WarpScan(row[0]);
    shared->entries_before[lane + 1] = WarpScan(row[1]);
    if (lane == 0) shared->staged_before[0] = shared->entries_before[0] = 0;
  }
  __syncthreads();
  return true;
}

// Writes the receiver's side of the plan. All blocks share the work.
__device__ inline void WriteReceived(const DeviceCall& call, const PrepareParams& params,
                                     int columns, const PrepareShared& shared) {
  const MutablePlan& plan = params.plan;
  const int stride = params.blocks * kThreads;
  const int start = blockIdx.x * kThreads + threadIdx.x;
  const int32_t entries = shared.entries_before[call.ranks];
  const int32_t staged = shared.staged_before[call.ranks];
  for (int i = start; i < params.sizes.capacity; i += stride) {
    int32_t row = -1;
    int32_t slot = -1;
    if (i < entries) {
      int source = 0;
      while (i >= shared.entries_before[source + 1]) ++source;
      const auto* sent = reinterpret_cast<const uint2*>(call.Entries(call.me, source));
      const uint2 entry = __ldcg(&sent[i - shared.entries_before[source]]);
      row = static_cast<int32_t>(entry.x);
      slot = static_cast<int32_t>(entry.y & 31);
      const int64_t number = int64_t{shared.staged_before[source]} + (entry.y >> 6);
      if ((entry.y & 32) != 0 && number < staged) plan.staged_start[number] = i;
    }
    plan.staged_row[i] = row;
    plan.staged_slot[i] = slot;
  }
  const int starts = call.ranks * params.sizes.tokens + 1;
  for (int i = staged + start; i < starts; i += stride) plan.staged_start[i] = entries;
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < call.ranks * columns; i += kThreads) {
    const int source = i / columns, column = i % columns;
    plan.recv_count[i] = column < 3    ? shared.received[source][column]
                         : column == 3 ? 0
                                       : __ldcg(&PairCountsAt(call, call.me, source)[column - 4]);
  }
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_EXCHANGE_ENTRIES_CUH_
