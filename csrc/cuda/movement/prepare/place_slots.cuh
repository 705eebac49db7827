// Phase 4 of prepare: places the rows of this rank's slots, and counts the rows for each rank.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PLACE_SLOTS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PLACE_SLOTS_CUH_

#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/prepare/spread_rows.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

constexpr int kSlotsAtOnce = 8;  // slots that a lane loads at once

struct PrepareShared {
  SpreadShared spread;
  int32_t warp_counts[kWarps][kMaxRanks];  // entries of each warp to each rank
  int32_t warp_staged[kWarps][kMaxRanks];
  int32_t warp_halves[kWarps][kMaxRanks];
  int32_t block_entries[kMaxRanks];  // entries of earlier blocks
  int32_t block_staged[kMaxRanks];
  int32_t received[kMaxRanks][4];  // rows of recv_count
  int32_t entries_before[kMaxRanks + 1];
  int32_t staged_before[kMaxRanks + 1];
};

// Writes dst_rank and dst_row of the warp's slots. Counts for each rank (lane r) its entries, its
// staged rows, and the staged rows of the first half of the tokens.
__device__ inline void PlaceSlots(const DeviceCall& call, const PrepareParams& params,
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
      int32_t position = experts.first[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      int at = experts.Home(expert);
      while (at >= 0 && position >= experts.rows[at]) {
        position -= experts.rows[at];
        at = experts.spare > 0 ? experts.next[at] : -1;
      }
      if (at >= 0) {
        rank = at / experts.physical();
        row = experts.base[at] + position;
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
    for (int first = 0; first < top_k; first += kSlotsAtOnce) {
      int32_t ranks[kSlotsAtOnce];
#pragma unroll
      for (int k = 0; k < kSlotsAtOnce; ++k) {
        const bool real = token < range.end && first + k < top_k;
        ranks[k] = real ? __ldcg(&params.plan.dst_rank[token * top_k + first + k]) : -1;
      }
#pragma unroll
      for (int32_t rank : ranks) {
        if (rank >= 0) mask |= 1u << rank;
        for (int r = 0; r < call.ranks; ++r) {
          const int32_t found = __popc(__ballot_sync(~0u, rank == r));
          if (lane == r) entries += found;
        }
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

// Sums counts over the block's warps, and replaces each warp's count by the sum over earlier warps.
// The block's sums go to scratch, [3][blocks][32], and are returned to the threads that add up all
// blocks.
__device__ inline int32_t SumBlock(const DeviceCall& call, PrepareShared* shared) {
  const int lane = threadIdx.x % 32;
  const int which = threadIdx.x / 32;
  int32_t sum = 0;
  if (which < 3) {
    auto* counts = which == 0   ? shared->warp_counts
                   : which == 1 ? shared->warp_staged
                                : shared->warp_halves;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = counts[w][lane];
      counts[w][lane] = sum;
      sum += count;
    }
    ScratchBlockCounts(call)[(which * kMaxBlocks + blockIdx.x) * kMaxRanks + lane] = sum;
  }
  return sum;
}

// Returns where `source` writes for `dest` how many staged rows it has for each rank, in total and
// in the first half.
__device__ inline int32_t* PairCountsAt(const DeviceCall& call, int dest, int source) {
  return call.Counts(dest, source) + call.group->num_experts;
}

// Sums counts over earlier blocks. `own` is SumBlock's result. The first block also writes to every
// rank how many rows that rank gets from this one, to words on the line of the counts flag; in a
// packed call also how many every other rank gets.
__device__ inline void SumBlocks(const DeviceCall& call, int blocks, bool packed, int32_t own,
                                 PrepareShared* shared) {
  const int lane = threadIdx.x % 32;
  const int which = threadIdx.x / 32;
  if (which < 3) {
    const int32_t* counts = ScratchBlockCounts(call) + which * kMaxBlocks * kMaxRanks;
    int32_t before = 0;
    int32_t all = 0;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      const int32_t count = b == blockIdx.x ? own : __ldcg(&counts[b * kMaxRanks + lane]);
      before += b < blockIdx.x ? count : 0;
      all += count;
    }
    if (which == 0) shared->block_entries[lane] = before;
    if (which == 1) shared->block_staged[lane] = before;
    if (blockIdx.x == 0 && lane < call.ranks) {
      // Column order in recv_count: staged rows, entries, staged rows of the first half.
      const int column = which == 0 ? 1 : which == 1 ? 0 : 2;
      reinterpret_cast<int32_t*>(call.CountsFlag(lane, call.me))[4 + column] = all;
      for (int dest = 0; packed && which > 0 && dest < call.ranks; ++dest) {
        PairCountsAt(call, dest, call.me)[(which - 1) * call.ranks + lane] = all;
      }
    }
  }
  __syncthreads();
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PLACE_SLOTS_CUH_
