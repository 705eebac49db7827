// Which staged row of which rank a token is, from the plan's dst_rank.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/warp_scan.cuh"

namespace ep_runtime {
namespace cuda {

constexpr int kMaxWarps = 32;

// Scratch of the group, in words.
__device__ __forceinline__ int32_t* ScratchHistograms(const DeviceCall& call) {
  return call.group->scratch;  // [kMaxPrepareBlocks, E]
}
__device__ __forceinline__ int32_t* ScratchBlockCounts(const DeviceCall& call) {
  return call.group->scratch + kMaxPrepareBlocks * call.group->num_experts;  // [3][blocks][ranks]
}
__device__ __forceinline__ int32_t* StagedTable(const DeviceCall& call) {
  return ScratchBlockCounts(call) + 3 * kMaxBlocks * kMaxRanks;  // [T, N]
}

struct StagedIndexShared {
  int32_t warp_counts[kMaxWarps][kMaxRanks];
  int32_t base[kMaxRanks];
};

// Bit r: a slot of the token keeps a row on rank r.
__device__ inline uint32_t RanksOfToken(const int32_t* dst_rank, int top_k, int ranks) {
  uint32_t mask = 0;
  const auto add = [&](int32_t rank) {
    if (rank >= 0 && rank < ranks) mask |= 1u << rank;
  };
  if (top_k % 4 == 0 && reinterpret_cast<uintptr_t>(dst_rank) % 16 == 0) {
    for (int k = 0; k < top_k; k += 4) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(dst_rank + k));
      add(four.x);
      add(four.y);
      add(four.z);
      add(four.w);
    }
  } else {
    for (int k = 0; k < top_k; ++k) add(dst_rank[k]);
  }
  return mask;
}

// How many tokens each rank keeps before each of some windows. A block counts them once, so that
// none of its warps goes through all tokens.
struct TokenTable {
  static constexpr int kWords = 2048;

  int32_t before[kWords];  // [windows, ranks]
  int shift;               // a window has 32 << shift tokens

  // Every thread of the block calls it.
  __device__ void Count(const int32_t* dst_rank, int top_k, int ranks, int tokens) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    const int pieces = (tokens + 31) / 32;  // of 32 tokens
    int log = 0;
    while ((pieces >> log) >= kWords / ranks) ++log;
    if (threadIdx.x == 0) shift = log;
    const int windows = (pieces >> log) + 1;
    for (int i = threadIdx.x; i < windows * ranks; i += blockDim.x) before[i] = 0;
    __syncthreads();
    for (int piece = warp; piece < pieces; piece += warps * kAtOnce) {
      uint32_t masks[kAtOnce];
      ReadMasks(dst_rank, top_k, ranks, tokens, piece * 32 + lane, warps * 32, masks);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        int32_t count = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const int32_t found = __popc(__ballot_sync(~0u, masks[u] >> rank & 1));
          if (lane == rank) count = found;
        }
        const int window = (piece + u * warps) >> log;
        if (count != 0) atomicAdd(&before[window * ranks + lane], count);
      }
    }
    __syncthreads();
    for (int rank = warp; rank < ranks; rank += warps) {
      int32_t sum = 0;
      for (int base = 0; base < windows; base += 32) {
        const int at = (base + lane) * ranks + rank;
        const int32_t own = base + lane < windows ? before[at] : 0;
        const int32_t upto = WarpScan(own);
        if (base + lane < windows) before[at] = sum + upto - own;
        sum += __shfl_sync(~0u, upto, 31);
      }
    }
    __syncthreads();
  }

 private:
  static constexpr int kAtOnce = 4;  // tokens of a lane whose loads are on their way together

  // Of tokens first, first + step, ...; none where there are no more.
  __device__ static void ReadMasks(const int32_t* dst_rank, int top_k, int ranks, int tokens,
                                   int first, int step, uint32_t (&masks)[kAtOnce]) {
    const bool fours = top_k % 4 == 0 && reinterpret_cast<uintptr_t>(dst_rank) % 16 == 0;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) masks[u] = 0;
    for (int k = 0; k < top_k; k += fours ? 4 : 1) {
      int4 four[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int token = first + u * step;
        const int32_t* at = dst_rank + int64_t{token} * top_k + k;
        four[u] = make_int4(-1, -1, -1, -1);
        if (token >= tokens) continue;
        if (fours) {
          four[u] = __ldg(reinterpret_cast<const int4*>(at));
        } else {
          four[u].x = __ldg(at);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        for (int32_t rank : {four[u].x, four[u].y, four[u].z, four[u].w}) {
          if (rank >= 0 && rank < ranks) masks[u] |= 1u << rank;
        }
      }
    }
  }
};

// Numbers the tokens that each rank keeps, for a warp that takes tokens in increasing order and
// passes over those of other warps: no block waits for another.
struct TokenCounter {
  const TokenTable& table;
  int32_t start = -32;  // of the 32 tokens that are looked at
  uint32_t kept = 0;    // lane r, bit i: rank r keeps token start + i
  int32_t before = 0;   // lane r: tokens before `start` that rank r keeps

  __device__ explicit TokenCounter(const TokenTable& t) : table(t) {}

  // Lane r gets the token's number among those that rank r keeps, -1 where it keeps none.
  __device__ int32_t Number(const int32_t* dst_rank, int top_k, int ranks, int tokens, int token) {
    const int lane = threadIdx.x % 32;
    const int window = token >> (5 + table.shift);
    const int first = window << (5 + table.shift);
    if (first > start + 32) {
      start = first - 32;
      kept = 0;
      before = lane < ranks ? table.before[window * ranks + lane] : 0;
    }
    while (token - start >= 32) {
      before += __popc(kept);
      start += 32;
      const int at = start + lane;
      const uint32_t mask =
          at < tokens ? RanksOfToken(dst_rank + int64_t{at} * top_k, top_k, ranks) : 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
        if (lane == rank) kept = found;
      }
    }
    const int bit = token - start;
    return (kept >> bit & 1) != 0 ? before + __popc(kept & ((1u << bit) - 1)) : -1;
  }
};

// Lane r gets how many of the warp's tokens in [first, last) rank r keeps.
__device__ inline int32_t CountTokens(const DeviceCall& call, const int32_t* dst_rank, int top_k,
                                      int first, int last) {
  const int lane = threadIdx.x % 32;
  int32_t count = 0;
  for (int start = first; start < last; start += blockDim.x) {
    const int token = start + static_cast<int>(threadIdx.x);
    const uint32_t mask =
        token < last ? RanksOfToken(dst_rank + int64_t{token} * top_k, top_k, call.ranks) : 0;
    for (int rank = 0; rank < call.ranks; ++rank) {
      const int32_t found = __popc(__ballot_sync(~0u, mask >> rank & 1));
      if (lane == rank) count += found;
    }
  }
  return count;
}

constexpr int kTableBarrier = 1;

// Writes table[token, rank] = number of the token among those of [begin, end) that rank keeps, -1
// where it keeps none. `blocks` blocks share the work, this one is number `block`; uses barrier 0,
// and kTableBarrier, which all of them have met once the table is whole. False: the call failed.
__device__ inline bool IndexTokens(const DeviceCall& call, StagedIndexShared* shared,
                                   const int32_t* dst_rank, int top_k, int begin, int end,
                                   int block, int blocks) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int64_t tokens = end - begin;
  const int first = begin + static_cast<int>(tokens * block / blocks);
  const int last = begin + static_cast<int>(tokens * (block + 1) / blocks);
  int32_t* table = StagedTable(call);
  int32_t* counts = ScratchBlockCounts(call);

  shared->warp_counts[warp][lane] = CountTokens(call, dst_rank, top_k, first, last);
  __syncthreads();
  if (warp == 0) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared->warp_counts[w][lane];
    counts[block * kMaxRanks + lane] = sum;
  }
  if (!MeetBlocks(call, 0, blocks)) return false;
  if (warp == 0) {
    int32_t sum = 0;
    for (int b = 0; b < block; ++b) sum += __ldcg(&counts[b * kMaxRanks + lane]);
    shared->base[lane] = sum;
  }
  __syncthreads();
  for (int start = first; start < last; start += blockDim.x) {
    const int token = start + static_cast<int>(threadIdx.x);
    const uint32_t mask =
        token < last ? RanksOfToken(dst_rank + int64_t{token} * top_k, top_k, call.ranks) : 0;
    for (int rank = 0; rank < call.ranks; ++rank) {
      const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
      if (lane == 0) shared->warp_counts[warp][rank] = __popc(found);
    }
    __syncthreads();
    for (int rank = 0; rank < call.ranks; ++rank) {
      const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
      int32_t before = shared->base[rank];
      for (int w = 0; w < warp; ++w) before += shared->warp_counts[w][rank];
      before += __popc(found & ((1u << lane) - 1));
      if (token < last) {
        table[int64_t{token} * call.ranks + rank] = (mask >> rank & 1) != 0 ? before : -1;
      }
    }
    __syncthreads();
    if (warp == 0) {
      for (int w = 0; w < warps; ++w) {
        shared->base[lane] += lane < call.ranks ? shared->warp_counts[w][lane] : 0;
      }
    }
    __syncthreads();
  }
  return MeetBlocks(call, kTableBarrier, blocks);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_
