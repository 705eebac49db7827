// Numbers the staged rows of tokens, from the plan's dst_rank.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/warp_scan.cuh"

namespace ep_runtime {
namespace cuda {

// Returns histograms [kMaxPrepareBlocks, E] in the group's scratch.
__device__ __forceinline__ int32_t* ScratchHistograms(const DeviceCall& call) {
  return call.group->scratch;
}
__device__ __forceinline__ int32_t* ScratchBlockCounts(const DeviceCall& call) {
  return call.group->scratch + kMaxPrepareBlocks * call.group->num_experts;  // [3][blocks][ranks]
}

// Returns a mask: bit r is set if a slot of the token keeps a row on rank r.
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

// For each window (32 << shift tokens), how many earlier tokens each rank keeps. A block counts
// once, so that no warp goes through all tokens.
struct TokenTable {
  static constexpr int kWords = 2048;

  int32_t before[kWords];  // [windows, ranks]

  // A window has 32 << shift tokens.
  __device__ static int Shift(int ranks, int tokens) {
    const int pieces = (tokens + 31) / 32;
    int log = 0;
    while ((pieces >> log) >= kWords / ranks) ++log;
    return log;
  }
  __device__ static int Windows(int ranks, int tokens) {
    return ((tokens + 31) / 32 >> Shift(ranks, tokens)) + 1;
  }
  // Fills `before`. Every thread of the block calls this.
  __device__ void Count(const int32_t* dst_rank, int top_k, int ranks, int tokens) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    const int pieces = (tokens + 31) / 32;  // pieces of 32 tokens
    const int log = Shift(ranks, tokens), windows = Windows(ranks, tokens);
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
  static constexpr int kAtOnce = 4;  // tokens that a lane loads at once

  // Reads masks of tokens first, first + step, ...; past the last token masks are 0.
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
// skips tokens of other warps.
struct TokenCounter {
  const int32_t* table;  // counts of a TokenTable
  int shift;
  int32_t start = -32;  // first of the 32 tokens that `kept` describes
  uint32_t kept = 0;    // lane r, bit i: rank r keeps token start + i
  int32_t before = 0;   // lane r: tokens before `start` that rank r keeps

  __device__ TokenCounter(const int32_t* counted, int ranks, int tokens)
      : table(counted), shift(TokenTable::Shift(ranks, tokens)) {}

  // Lane r returns the token's number among the tokens that rank r keeps, -1 if rank r does not
  // keep the token.
  __device__ int32_t Number(const int32_t* dst_rank, int top_k, int ranks, int tokens, int token) {
    const int lane = threadIdx.x % 32;
    const int window = token >> (5 + shift);
    const int first = window << (5 + shift);
    if (first > start + 32) {
      start = first - 32;
      kept = 0;
      before = lane < ranks ? table[window * ranks + lane] : 0;
    }
    while (token - start >= 32) {
      start += 32;
      const int at = start + lane;
      const uint32_t mask =
          at < tokens ? RanksOfToken(dst_rank + int64_t{at} * top_k, top_k, ranks) : 0;
      before += __popc(kept);
      for (int rank = 0; rank < ranks; ++rank) {
        const uint32_t found = __ballot_sync(~0u, mask >> rank & 1);
        if (lane == rank) kept = found;
      }
    }
    const int bit = token - start;
    return (kept >> bit & 1) != 0 ? before + __popc(kept & ((1u << bit) - 1)) : -1;
  }
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_INDEX_CUH_
