#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/prepare/check_indices.cuh"
#include "cuda/movement/prepare/prepare_kernels.h"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// One kept row on its way to the rank that gets it: 8 bytes, as the window has per slot.
struct Entry {
  int32_t row;
  uint32_t staged;  // number of its staged row * 64 + 32 if it is that row's first entry + slot
};
static_assert(sizeof(Entry) == sizeof(uint2), "stored at once");

// Arrays over experts lie in dynamic shared memory.
struct Experts {
  int32_t* demand;   // [E] rows asked, all sources
  int32_t* kept;     // [E]
  int32_t* base;     // [E] first row of the expert in its rank's slab
  int32_t* first;    // [E] rows of earlier sources and of this rank's earlier blocks
  int32_t* sources;  // [E] rows of earlier sources alone
  uint16_t* counts;  // [kWarps, E] slots of each warp, then of the earlier warps

  static size_t Bytes(int experts) { return AlignUp(experts * int64_t{5 * 4 + kWarps * 2}, 16); }
  __device__ Experts(uint8_t* shared, int experts) {
    demand = reinterpret_cast<int32_t*>(shared);
    kept = demand + experts;
    base = kept + experts;
    first = base + experts;
    sources = first + experts;
    counts = reinterpret_cast<uint16_t*>(sources + experts);
  }
};

struct PrepareShared {
  int32_t warp_counts[kWarps][kMaxRanks];  // entries of each warp to each rank
  int32_t warp_staged[kWarps][kMaxRanks];
  int32_t warp_halves[kWarps][kMaxRanks];
  int32_t block_entries[kMaxRanks];  // of earlier blocks
  int32_t block_staged[kMaxRanks];
  int32_t received[kMaxRanks][4];  // what recv_count gets
  int32_t entries_before[kMaxRanks + 1];
  int32_t staged_before[kMaxRanks + 1];
};

// Warps own whole tokens, in order: no other warp or block has slots between a warp's own.
struct TokenRange {
  int32_t begin;
  int32_t end;
  __device__ TokenRange(int64_t tokens, int part, int parts)
      : begin(static_cast<int32_t>(tokens * part / parts)),
        end(static_cast<int32_t>(tokens * (part + 1) / parts)) {}
};

__device__ inline int ExpertOf(const PrepareParams& params, int64_t slot, int64_t end,
                               int num_experts) {
  const int32_t expert = slot < end ? params.topk_idx[slot] : -1;
  return expert >= 0 && expert < num_experts ? expert : -1;
}

// Counts the slots of each warp and turns them into sums over earlier warps; the block's own
// counts go to the group's scratch.
__device__ void CountSlots(const DeviceCall& call, const PrepareParams& params,
                           const Experts& experts, int num_experts, const TokenRange& range) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) experts.counts[i] = 0;
  __syncthreads();
  uint16_t* mine = experts.counts + warp * num_experts;
  const int64_t end = int64_t{range.end} * params.sizes.top_k;
  for (int64_t at = int64_t{range.begin} * params.sizes.top_k; at < end; at += 32) {
    const int expert = ExpertOf(params, at + lane, end, num_experts);
    const uint32_t same = __match_any_sync(~0u, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) {
      mine[expert] = static_cast<uint16_t>(mine[expert] + __popc(same));
    }
    __syncwarp();
  }
  __syncthreads();
  int32_t* histogram = ScratchHistograms(call) + blockIdx.x * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = experts.counts[w * num_experts + e];
      experts.counts[w * num_experts + e] = static_cast<uint16_t>(sum);
      sum += count;
    }
    histogram[e] = sum;
  }
}

// Sums over blocks; the first block sends the count row to every rank, this one included.
__device__ void SendCounts(const DeviceCall& call, const Experts& experts, int num_experts) {
  const int32_t* histograms = ScratchHistograms(call);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int32_t before = 0;
    int32_t all = 0;
#pragma unroll 8
    for (int b = 0; b < gridDim.x; ++b) {
      const int32_t count = __ldcg(&histograms[b * num_experts + e]);
      before += b < blockIdx.x ? count : 0;
      all += count;
    }
    experts.first[e] = before;
    if (blockIdx.x == 0) {
      for (int dest = 0; dest < call.ranks; ++dest) call.Counts(dest, call.me)[e] = all;
    }
  }
  if (blockIdx.x != 0) return;
  __syncthreads();
  if (threadIdx.x < call.ranks) StoreReleaseSys(call.CountsFlag(threadIdx.x, call.me), call.tag);
}

__device__ bool AwaitCounts(const DeviceCall& call) {
  bool alive = true;
  const int source = threadIdx.x;
  if (source < call.ranks) {
    alive = AwaitWord(call, call.CountsFlag(call.me, source), call.tag, source);
  }
  return __syncthreads_and(alive);
}

__device__ inline int32_t WarpScan(int32_t value) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

__device__ inline int32_t UpTo(int32_t value, int32_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Aligned rows of one rank's experts, none above `level`.
__device__ int64_t Zones(const int32_t* demand, int experts, int64_t level, int32_t alignment) {
  int64_t rows = 0;
  for (int e = threadIdx.x % 32; e < experts; e += 32) {
    rows += UpTo(static_cast<int32_t>(min(int64_t{demand[e]}, level)), alignment);
  }
  for (int step = 16; step > 0; step /= 2) rows += __shfl_xor_sync(~0u, rows, step);
  return rows;
}

// The rule of KeptRows in core/memory/plan.cc, by one warp.
__device__ void KeepRows(const int32_t* demand, int experts, int32_t capacity, int32_t alignment,
                         int32_t* kept) {
  const int lane = threadIdx.x % 32;
  int32_t most = 0;
  for (int e = lane; e < experts; e += 32) most = max(most, demand[e]);
  most = __reduce_max_sync(~0u, most);
  if (Zones(demand, experts, most, alignment) <= capacity) {
    for (int e = lane; e < experts; e += 32) kept[e] = demand[e];
    return;
  }
  int32_t low = 0;
  int32_t high = most / alignment + 1;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (Zones(demand, experts, int64_t{middle} * alignment, alignment) <= capacity ? low : high) =
        middle;
  }
  const int32_t level = low * alignment;
  // The first experts above the level get one block more each, while blocks are left.
  int32_t left =
      static_cast<int32_t>(capacity - Zones(demand, experts, level, alignment)) / alignment;
  for (int start = 0; start < experts; start += 32) {
    const int e = start + lane;
    const bool above = e < experts && demand[e] > level;
    const uint32_t which = __ballot_sync(~0u, above);
    const bool extra = above && __popc(which & ((1u << lane) - 1)) < left;
    left = max(left - __popc(which), 0);
    if (e < experts) kept[e] = min(demand[e], level + (extra ? alignment : 0));
  }
}

// From the count matrix, what LayOutRows of core/memory/plan.cc computes, and where this block's
// rows start.
__device__ void LayOutRows(const DeviceCall& call, const PrepareParams& params,
                           const Experts& experts, int num_experts) {
  const int64_t stride = call.group->source_counts_bytes / 4;
  const int32_t* matrix = call.Counts(call.me, 0);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int32_t demand = 0;
    int32_t before = 0;
    for (int source = 0; source < call.ranks; ++source) {
      const int32_t count = __ldcg(&matrix[source * stride + e]);
      before += source < call.me ? count : 0;
      demand += count;
    }
    experts.demand[e] = demand;
    experts.sources[e] = before;
    experts.first[e] += before;
  }
  __syncthreads();
  const int local = params.sizes.experts;
  const int lane = threadIdx.x % 32;
  for (int rank = threadIdx.x / 32; rank < call.ranks; rank += kWarps) {
    const int start = rank * local;
    KeepRows(experts.demand + start, local, params.sizes.capacity, params.alignment,
             experts.kept + start);
    __syncwarp();
    int32_t base = 0;
    for (int at = 0; at < local; at += 32) {
      const bool real = at + lane < local;
      const int32_t zone = real ? UpTo(experts.kept[start + at + lane], params.alignment) : 0;
      const int32_t sum = WarpScan(zone);
      if (real) experts.base[start + at + lane] = base + sum - zone;
      base += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
}

// Writes dst_rank and dst_row of the warp's slots and counts, per rank (lane r), its entries and
// staged rows, and those of the first half of the tokens.
__device__ void PlaceSlots(const DeviceCall& call, const PrepareParams& params,
                           const Experts& experts, int num_experts, const TokenRange& range,
                           PrepareShared* shared) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int top_k = params.sizes.top_k;
  uint16_t* mine = experts.counts + warp * num_experts;
  const int64_t end = int64_t{range.end} * top_k;
  for (int64_t at = int64_t{range.begin} * top_k; at < end; at += 32) {
    const int64_t slot = at + lane;
    const int expert = ExpertOf(params, slot, end, num_experts);
    const uint32_t same = __match_any_sync(~0u, expert);
    int32_t rank = -1;
    int32_t row = -1;
    if (expert >= 0) {
      const int32_t position =
          experts.first[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      if (position < experts.kept[expert]) {
        rank = expert / params.sizes.experts;
        row = experts.base[expert] + position;
      }
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      mine[expert] = static_cast<uint16_t>(mine[expert] + __popc(same));
    }
    __syncwarp();
    if (slot < end) {
      params.plan.dst_rank[slot] = rank;
      params.plan.dst_row[slot] = row;
    }
  }
  __syncwarp();
  const int half = (params.sizes.tokens + 1) / 2;
  int32_t entries = 0;
  int32_t staged = 0;
  int32_t first_half = 0;
  for (int start = range.begin; start < range.end; start += 32) {
    const int64_t token = start + lane;
    uint32_t mask = 0;
    for (int k = 0; k < top_k; ++k) {
      const int32_t rank =
          token < range.end ? __ldcg(&params.plan.dst_rank[token * top_k + k]) : -1;
      if (rank >= 0) mask |= 1u << rank;
      for (int r = 0; r < call.ranks; ++r) {
        const int32_t found = __popc(__ballot_sync(~0u, rank == r));
        if (lane == r) entries += found;
      }
    }
    for (int r = 0; r < call.ranks; ++r) {
      const uint32_t found = __ballot_sync(~0u, mask >> r & 1);
      const uint32_t early = __ballot_sync(~0u, token < half);
      if (lane == r) {
        staged += __popc(found);
        first_half += __popc(found & early);
      }
    }
  }
  shared->warp_counts[warp][lane] = entries;
  shared->warp_staged[warp][lane] = staged;
  shared->warp_halves[warp][lane] = first_half;
  __syncthreads();
}

// Block sums over warps go to scratch; the warps' become sums over earlier warps. [3][blocks][32].
__device__ void SumBlock(const DeviceCall& call, PrepareShared* shared) {
  const int lane = threadIdx.x % 32;
  const int which = threadIdx.x / 32;
  if (which < 3) {
    auto* counts = which == 0   ? shared->warp_counts
                   : which == 1 ? shared->warp_staged
                                : shared->warp_halves;
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = counts[w][lane];
      counts[w][lane] = sum;
      sum += count;
    }
    ScratchBlockCounts(call)[(which * kMaxBlocks + blockIdx.x) * kMaxRanks + lane] = sum;
  }
}

// Sums over earlier blocks. The first block also tells every rank what this one sends it: the
// words after the entries flags' line of the counts flag.
__device__ void SumBlocks(const DeviceCall& call, PrepareShared* shared) {
  const int lane = threadIdx.x % 32;
  const int which = threadIdx.x / 32;
  if (which < 3) {
    const int32_t* counts = ScratchBlockCounts(call) + which * kMaxBlocks * kMaxRanks;
    int32_t before = 0;
    int32_t all = 0;
#pragma unroll 8
    for (int b = 0; b < gridDim.x; ++b) {
      const int32_t count = __ldcg(&counts[b * kMaxRanks + lane]);
      before += b < blockIdx.x ? count : 0;
      all += count;
    }
    if (which == 0) shared->block_entries[lane] = before;
    if (which == 1) shared->block_staged[lane] = before;
    if (blockIdx.x == 0 && lane < call.ranks) {
      // Column order of recv_count: staged rows, entries, staged rows of the first half.
      const int column = which == 0 ? 1 : which == 1 ? 0 : 2;
      reinterpret_cast<int32_t*>(call.CountsFlag(lane, call.me))[4 + column] = all;
    }
  }
  __syncthreads();
}

// Sends the entries of the warp's slots, token by token, to the ranks that get the rows.
__device__ void SendEntries(const DeviceCall& call, const PrepareParams& params,
                            const TokenRange& range, const PrepareShared& shared) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int top_k = params.sizes.top_k;
  // Lane r holds the next entry and staged row of rank r. A step takes the whole tokens that fit.
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
      const Entry sent{row, static_cast<uint32_t>(staged) << 6 | (first ? 32u : 0u) |
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

// Waits for all entries of all sources, then reads what each sent.
__device__ bool AwaitEntries(const DeviceCall& call, const PrepareParams& params,
                             PrepareShared* shared) {
  bool alive = true;
  const int flags = call.ranks * static_cast<int>(gridDim.x);
  for (int i = threadIdx.x; i < flags && alive; i += kThreads) {
    const int source = i / gridDim.x;
    alive = AwaitWord(call, call.EntriesFlag(call.me, source, i % gridDim.x), call.tag, source);
  }
  if (!__syncthreads_and(alive)) return false;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int32_t row[3] = {0, 0, 0};
    if (lane < call.ranks) {
      const auto* sent = reinterpret_cast<const int32_t*>(call.CountsFlag(call.me, lane)) + 4;
      for (int i = 0; i < 3; ++i) row[i] = __ldcg(&sent[i]);
    }
    for (int i = 0; i < 3; ++i) shared->received[lane][i] = row[i];
    shared->staged_before[lane + 1] = WarpScan(row[0]);
    shared->entries_before[lane + 1] = WarpScan(row[1]);
    if (lane == 0) shared->staged_before[0] = shared->entries_before[0] = 0;
  }
  __syncthreads();
  return true;
}

// The receiver's side of the plan; all blocks share it.
__device__ void WriteReceived(const DeviceCall& call, const PrepareParams& params,
                              const PrepareShared& shared) {
  const MutablePlan& plan = params.plan;
  const int stride = gridDim.x * kThreads;
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
      if ((entry.y & 32) != 0) {
        plan.staged_start[shared.staged_before[source] + static_cast<int32_t>(entry.y >> 6)] = i;
      }
    }
    plan.staged_row[i] = row;
    plan.staged_slot[i] = slot;
  }
  const int starts = call.ranks * params.sizes.tokens + 1;
  for (int i = staged + start; i < starts; i += stride) plan.staged_start[i] = entries;
  if (blockIdx.x == 0 && threadIdx.x < call.ranks * 4) {
    const int column = threadIdx.x % 4;
    plan.recv_count[threadIdx.x] = column < 3 ? shared.received[threadIdx.x / 4][column] : 0;
  }
}

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

// Tells all ranks of all domains the first rank of this domain that is over its capacity, by one
// warp, and takes the lowest of all. Its own sequence, in two slots: domains share no epochs.
__device__ void GatherVerdict(const DeviceCall& call, const PrepareParams& params,
                              const Experts& experts) {
  const int lane = threadIdx.x % 32;
  DeviceGroup* group = call.group;
  const uint64_t sequence = group->verdicts + 1;
  const int64_t slot = static_cast<int64_t>(sequence % kVerdictSlots) * group->world_size;
  DeviceVerdict mine{-1, 0, params.sizes.capacity};
  for (int rank = call.ranks - 1; rank >= 0; --rank) {
    const int64_t demand = Zones(experts.demand + rank * params.sizes.experts, params.sizes.experts,
                                 INT32_MAX, params.alignment);
    if (demand <= params.sizes.capacity) continue;
    mine.rank = group->first_rank + rank;
    mine.demand = static_cast<int32_t>(min(demand, int64_t{INT32_MAX}));
  }
  const auto line = [&](int dest, int source) {
    // Windows of other domains lie on the same stride as this one's.
    uint8_t* window = group->windows + int64_t{dest - group->first_rank} * group->window_stride;
    return reinterpret_cast<VerdictLine*>(window + group->verdicts_offset) + slot + source;
  };
  for (int dest = lane; dest < group->world_size; dest += 32) {
    VerdictLine* sent = line(dest, group->first_rank + call.me);
    sent->rank = mine.rank;
    sent->demand = mine.demand;
    sent->capacity = mine.capacity;
    StoreReleaseSys(&sent->sequence, sequence);
  }
  DeviceVerdict lowest{INT32_MAX, 0, 0};
  const uint64_t started_ns = GlobalTimerNs();
  bool alive = true;
  for (int source = lane; source < group->world_size; source += 32) {
    const VerdictLine* got = line(group->first_rank + call.me, source);
    for (uint32_t polls = 1; alive && LoadAcquireSys(&got->sequence) != sequence; ++polls) {
      if (polls % kPollsPerLook == 0) alive = KeepWaiting(call, -1, 0, 0, started_ns);
    }
    if (!alive) break;
    const volatile VerdictLine* seen = got;
    if (seen->rank >= 0 && seen->rank < lowest.rank) {
      lowest = {seen->rank, seen->demand, seen->capacity};
    }
  }
  if (!__all_sync(~0u, alive)) return;
  const int32_t rank = __reduce_min_sync(~0u, lowest.rank);
  const uint32_t holder = __ballot_sync(~0u, lowest.rank == rank);
  if (lane == __ffs(holder) - 1) {
    *params.verdict = rank == INT32_MAX ? DeviceVerdict{-1, 0, params.sizes.capacity} : lowest;
  }
  if (lane == 0) group->verdicts = sequence;
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

cudaError_t LaunchPrepare(cudaStream_t stream, const PrepareParams& params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || sizes.experts < 1 ||
      params.num_experts > kMaxExperts || params.num_experts % sizes.experts != 0 ||
      params.alignment < 1 || params.blocks < 1 || params.blocks > kMaxPrepareBlocks) {
    return cudaErrorInvalidValue;
  }
  const int64_t block_tokens = (sizes.tokens + params.blocks - 1) / params.blocks;
  if (block_tokens * sizes.top_k > kMaxBlockSlots) return cudaErrorInvalidValue;
  const size_t shared_bytes = Experts::Bytes(params.num_experts);
  const cudaError_t error = cudaFuncSetAttribute(
      PrepareKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  PrepareKernel<<<params.blocks, kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
