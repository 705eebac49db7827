// Computes the plan of a group over nodes in five kernels, each of which needs the previous one's
// results:
//
//   CountKernel    slots of every part of every rank by expert
//   LayOutKernel   a block for each rank: rows that its experts keep, where they begin, and where
//                  the rows of every part begin
//   PlaceKernel    the row of every slot of every rank
//   TallyKernel    how many of a part's rows, and of its tokens, are here
//   ReceiveKernel  entries and staged rows in the order of the ranks of this node
//
// A part is a run of one rank's tokens, and belongs to one block. A warp owns whole tokens, in
// order. Rows are numbered by sums over earlier ranks, parts and warps, so the plan is the same in
// every run.

#include <algorithm>

#include "cuda/movement/call/warp_scan.cuh"
#include "cuda/movement/prepare/lay_out_rows.cuh"
#include "cuda/nccl/node_plan.h"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace nccl {
namespace {

using cuda::WarpScan;
using cuda::prepare::CountExperts;
using cuda::prepare::KeepRows;
using cuda::prepare::TokenRange;
using cuda::prepare::UpTo;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxParts = 16;       // parts of one rank
constexpr int kEnoughBlocks = 256;  // blocks for the parts of all ranks
constexpr int kAtOnce = 16;         // loads that a thread issues at once
constexpr int kCounts = 4;  // words of a part: staged rows, entries, staged rows of the first half

int PartsOf(int64_t ranks, int64_t tokens, int64_t top_k) {
  const int64_t wanted = std::clamp<int64_t>(kEnoughBlocks / ranks, 1, kMaxParts);
  // A part's slots are counted in 16 bits, so parts must not be too large.
  const int64_t least = 2 * tokens * top_k / cuda::kMaxBlockSlots + 1;
  return static_cast<int>(std::max(least, std::clamp<int64_t>(tokens / kWarps, 1, wanted)));
}

struct Scratch {
  int32_t* here;  // [N, T, K] row in this rank's slab, -1 for none; sources in order of arrival
  int32_t* histogram;  // [N, parts, E] slots, later the first row of the part in its expert's zone
  int32_t* kept;       // [E]
  int32_t* base;       // [E]
  int32_t* counts;     // [N, parts, kCounts], sources in order of arrival
};

struct Params {
  NodePlanParams p;
  Scratch scratch;
  int32_t parts;

  __device__ int num_experts() const { return p.ranks * p.experts; }
  __device__ int32_t ExpertOf(int64_t rank, int64_t slot, int64_t end) const {
    if (slot >= end) return -1;
    const int32_t expert = __ldg(p.idx + rank * p.tokens * p.top_k + slot);
    return expert >= 0 && expert < num_experts() ? expert : -1;
  }
  // Returns the position of a rank among the sources of this rank's rows: sorted by index within a
  // node, then by node.
  __device__ int Arrival(int rank) const {
    return rank % p.node_size * (p.ranks / p.node_size) + rank / p.node_size;
  }
};

// blockIdx is (part, rank whose slots the block counts).
__global__ void __launch_bounds__(kThreads) CountKernel(const __grid_constant__ Params q) {
  extern __shared__ int32_t counts[];  // [E]
  const int experts = q.num_experts();
  for (int e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const TokenRange range(q.p.tokens, blockIdx.x, q.parts);
  const int64_t end = int64_t{range.end} * q.p.top_k;
  for (int64_t at = int64_t{range.begin} * q.p.top_k + threadIdx.x; at < end; at += kThreads) {
    const int32_t expert = q.ExpertOf(blockIdx.y, at, end);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  int32_t* out = q.scratch.histogram + (int64_t{blockIdx.y} * q.parts + blockIdx.x) * experts;
  for (int e = threadIdx.x; e < experts; e += kThreads) out[e] = counts[e];
}

// blockIdx.x is the rank whose experts the block lays out.
__global__ void __launch_bounds__(kThreads) LayOutKernel(const __grid_constant__ Params q) {
  extern __shared__ int32_t shared[];
  const int local = q.p.experts;
  const int rank = blockIdx.x;
  int32_t* demand = shared;  // [L]
  int32_t* kept = shared + local;
  for (int e = threadIdx.x; e < local; e += kThreads) {
    int32_t* column = q.scratch.histogram + rank * local + e;
    int32_t sum = 0;
    const int rows = q.p.ranks * q.parts;
    const int64_t step = q.num_experts();
    for (int i = 0; i < rows; i += kAtOnce) {
      int32_t counts[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) counts[u] = i + u < rows ? column[(i + u) * step] : 0;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (i + u < rows) column[(i + u) * step] = sum;
        sum += counts[u];
      }
    }
    demand[e] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  KeepRows(demand, local, q.p.capacity, q.p.alignment, kept);
  __syncwarp();
  const int lane = threadIdx.x;
  int32_t base = 0;
  int64_t asked = 0;
  int32_t dropped = 0;
  for (int at = 0; at < local; at += 32) {
    const int e = at + lane;
    const bool real = e < local;
    const int32_t rows = real ? kept[e] : 0;
    const int32_t zone = UpTo(rows, q.p.row_alignment);
    const int32_t sum = WarpScan(zone);
    if (real) {
      q.scratch.kept[rank * local + e] = rows;
      q.scratch.base[rank * local + e] = base + sum - zone;
      asked += UpTo(demand[e], q.p.alignment);
      dropped += demand[e] - rows;
    }
    if (real && rank == q.p.me) {
      q.p.kept[e] = rows;
      q.p.group_sizes[e] = zone;
    }
    base += __shfl_sync(~0u, sum, 31);
  }
  if (rank != q.p.me) return;
  for (int step = 16; step > 0; step /= 2) asked += __shfl_xor_sync(~0u, asked, step);
  dropped = __reduce_add_sync(~0u, dropped);
  if (lane == 0) {
    q.p.num_recv[0] = static_cast<int32_t>(min(asked, int64_t{INT32_MAX}));
    q.p.chunks[0] = 1;
  }
  // Dropped slots are counted for the first rank of the node, as in `nodes_plan.py`.
  for (int i = lane; i < q.p.node_size; i += 32) q.p.recv_count[i * 4 + 3] = i == 0 ? dropped : 0;
}

// Counts slots of each warp of the block by expert, and replaces the counts by sums over earlier
// warps.
__device__ void CountWarps(const Params& q, const TokenRange& range, uint16_t* counts) {
  const int experts = q.num_experts();
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  uint16_t* mine = counts + threadIdx.x / 32 * experts;
  const int64_t end = int64_t{range.end} * q.p.top_k;
  for (int64_t at = int64_t{range.begin} * q.p.top_k; at < end; at += 32) {
    CountExperts(q.ExpertOf(blockIdx.y, at + lane, end), mine);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = counts[w * experts + e];
      counts[w * experts + e] = static_cast<uint16_t>(sum);
      sum += count;
    }
  }
  __syncthreads();
}

__device__ TokenRange WarpTokens(const Params& q) {
  return TokenRange(q.p.tokens, blockIdx.x * kWarps + threadIdx.x / 32, q.parts * kWarps);
}

// blockIdx is (part, rank whose slots the block places).
__global__ void __launch_bounds__(kThreads) PlaceKernel(const __grid_constant__ Params q) {
  extern __shared__ uint16_t before[];  // [kWarps, E]
  const int source = blockIdx.y;
  const int experts = q.num_experts();
  const int lane = threadIdx.x % 32;
  const TokenRange range = WarpTokens(q);
  CountWarps(q, range, before);
  uint16_t* mine = before + threadIdx.x / 32 * experts;
  const int32_t* first = q.scratch.histogram + (int64_t{source} * q.parts + blockIdx.x) * experts;
  const int64_t slots = int64_t{q.p.tokens} * q.p.top_k;
  const int node = q.p.me / q.p.node_size;
  const bool rail = source % q.p.node_size == q.p.me % q.p.node_size;
  const int64_t virtual_first = source / q.p.node_size * slots;
  int32_t* here = q.scratch.here + q.Arrival(source) * slots;
  const int64_t end = int64_t{range.end} * q.p.top_k;
  for (int64_t at = int64_t{range.begin} * q.p.top_k; at < end; at += 32) {
    const int64_t slot = at + lane;
    const int32_t expert = q.ExpertOf(source, slot, end);
    const uint32_t same = __match_any_sync(~0u, expert);
    int32_t rank = -1;
    int32_t row = -1;
    if (expert >= 0) {
      const int32_t position = first[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      if (position < q.scratch.kept[expert]) {
        rank = expert / q.p.experts;
        row = q.scratch.base[expert] + position;
      }
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      mine[expert] = static_cast<uint16_t>(mine[expert] + __popc(same));
    }
    __syncwarp();
    if (slot >= end) continue;
    here[slot] = rank == q.p.me ? row : -1;
    if (source == q.p.me) {
      q.p.dst_rank[slot] = rank;
      q.p.dst_row[slot] = row;
    }
    if (rail) {
      const bool there = rank >= 0 && rank / q.p.node_size == node;
      q.p.virtual_rank[virtual_first + slot] = there ? rank % q.p.node_size : -1;
      q.p.virtual_row[virtual_first + slot] = there ? row : -1;
    }
  }
}

// How many staged rows and entries a source has, and how many staged rows from the first half of
// its virtual tokens.
struct Arrivals {
  int32_t staged;
  int32_t entries;
  int32_t early;
};

__device__ Arrivals CountTokens(const Params& q, int arrival, const TokenRange& range) {
  const int nodes = q.p.ranks / q.p.node_size;
  const int64_t half = (int64_t{nodes} * q.p.tokens + 1) / 2;
  const int64_t virtual_first = int64_t{arrival % nodes} * q.p.tokens;
  const int32_t* here = q.scratch.here + int64_t{arrival} * q.p.tokens * q.p.top_k;
  Arrivals sum{0, 0, 0};
  for (int token = range.begin + threadIdx.x % 32; token < range.end; token += 32) {
    int32_t rows = 0;
    for (int k = 0; k < q.p.top_k; ++k) rows += here[int64_t{token} * q.p.top_k + k] >= 0 ? 1 : 0;
    sum.entries += rows;
    sum.staged += rows > 0 ? 1 : 0;
    sum.early += rows > 0 && virtual_first + token < half ? 1 : 0;
  }
  sum.staged = __reduce_add_sync(~0u, sum.staged);
  sum.entries = __reduce_add_sync(~0u, sum.entries);
  sum.early = __reduce_add_sync(~0u, sum.early);
  return sum;
}

// blockIdx is (part, source in order of arrival).
__global__ void __launch_bounds__(kThreads) TallyKernel(const __grid_constant__ Params q) {
  __shared__ Arrivals warps[kWarps];
  const Arrivals mine = CountTokens(q, blockIdx.y, WarpTokens(q));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Arrivals sum{0, 0, 0};
  for (const Arrivals& warp : warps) {
    sum.staged += warp.staged;
    sum.entries += warp.entries;
    sum.early += warp.early;
  }
  int32_t* out = q.scratch.counts + (int64_t{blockIdx.y} * q.parts + blockIdx.x) * kCounts;
  out[0] = sum.staged;
  out[1] = sum.entries;
  out[2] = sum.early;
}

// Sums the counts of parts `begin` to `end` - 1, in order of arrival. A whole block calls this.
__device__ Arrivals SumParts(const Params& q, int begin, int end, Arrivals* shared) {
  Arrivals sum{0, 0, 0};
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    const int32_t* counts = q.scratch.counts + int64_t{i} * kCounts;
    sum.staged += counts[0];
    sum.entries += counts[1];
    sum.early += counts[2];
  }
  __syncthreads();
  if (threadIdx.x == 0) *shared = {0, 0, 0};
  __syncthreads();
  sum.staged = __reduce_add_sync(~0u, sum.staged);
  sum.entries = __reduce_add_sync(~0u, sum.entries);
  sum.early = __reduce_add_sync(~0u, sum.early);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&shared->staged, sum.staged);
    atomicAdd(&shared->entries, sum.entries);
    atomicAdd(&shared->early, sum.early);
  }
  __syncthreads();
  return *shared;
}

// Writes entries and staged rows of the warp's tokens, numbered from `entry` and `staged` on.
__device__ void WriteTokens(const Params& q, int arrival, const TokenRange& range, int32_t entry,
                            int32_t staged) {
  const int lane = threadIdx.x % 32;
  const int32_t* here = q.scratch.here + int64_t{arrival} * q.p.tokens * q.p.top_k;
  for (int start = range.begin; start < range.end; start += 32) {
    const int64_t token = start + lane;
    const bool real = token < range.end;
    int32_t rows = 0;
    for (int k = 0; real && k < q.p.top_k; ++k) rows += here[token * q.p.top_k + k] >= 0 ? 1 : 0;
    const int32_t last = WarpScan(rows);
    const uint32_t filled = __ballot_sync(~0u, rows > 0);
    int32_t at = entry + last - rows;
    if (rows > 0) {
      q.p.staged_start[staged + __popc(filled & ((1u << lane) - 1))] = at;
      for (int k = 0; k < q.p.top_k; ++k) {
        const int32_t row = here[token * q.p.top_k + k];
        if (row < 0) continue;
        q.p.staged_row[at] = row;
        q.p.staged_slot[at++] = k;
      }
    }
    entry += __shfl_sync(~0u, last, 31);
    staged += __popc(filled);
  }
}

// blockIdx is (part, source in order of arrival).
__global__ void __launch_bounds__(kThreads) ReceiveKernel(const __grid_constant__ Params q) {
  __shared__ Arrivals shared;
  __shared__ Arrivals warps[kWarps];
  const int arrival = blockIdx.y;
  const int block = arrival * q.parts + blockIdx.x;
  const int blocks = q.p.ranks * q.parts;
  const TokenRange range = WarpTokens(q);
  const Arrivals mine = CountTokens(q, arrival, range);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  const Arrivals all = SumParts(q, 0, blocks, &shared);
  Arrivals before = SumParts(q, 0, block, &shared);
  for (int w = 0; w < static_cast<int>(threadIdx.x / 32); ++w) {
    before.staged += warps[w].staged;
    before.entries += warps[w].entries;
  }
  WriteTokens(q, arrival, range, before.entries, before.staged);
  const int first = block * kThreads + threadIdx.x;
  const int stride = blocks * kThreads;
  for (int i = all.entries + first; i < q.p.capacity; i += stride) {
    q.p.staged_row[i] = -1;
    q.p.staged_slot[i] = -1;
  }
  const int starts = q.p.ranks * q.p.tokens + 1;
  for (int i = all.staged + first; i < starts; i += stride) q.p.staged_start[i] = all.entries;
  if (block != 0) return;
  const int of_rank = blocks / q.p.node_size;  // parts of one rank of the node
  for (int rank = 0; rank < q.p.node_size; ++rank) {
    const Arrivals sum = SumParts(q, rank * of_rank, (rank + 1) * of_rank, &shared);
    if (threadIdx.x != 0) continue;
    q.p.recv_count[rank * 4] = sum.staged;
    q.p.recv_count[rank * 4 + 1] = sum.entries;
    q.p.recv_count[rank * 4 + 2] = sum.early;
  }
}

}  // namespace

int64_t NodePlanScratch(int64_t ranks, int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t parts = ranks * PartsOf(ranks, tokens, top_k);
  const int64_t all = ranks * experts;
  return ranks * tokens * top_k + parts * all + 2 * all + parts * kCounts;
}

cudaError_t LaunchNodePlan(cudaStream_t stream, const NodePlanParams& p) {
  const int64_t all = int64_t{p.ranks} * p.experts;
  const int parts = PartsOf(p.ranks, p.tokens, p.top_k);
  const int64_t part_slots = (int64_t{p.tokens} + parts - 1) / parts * p.top_k;
  if (p.ranks < 1 || p.node_size < 1 || p.ranks % p.node_size != 0 || p.tokens < 1 || p.top_k < 1 ||
      p.top_k > 32 || p.experts < 1 || all > cuda::kMaxExperts ||
      part_slots > cuda::kMaxBlockSlots || p.row_alignment < 1 || p.alignment < 1 ||
      p.alignment % p.row_alignment != 0) {
    return cudaErrorInvalidValue;
  }
  Params q{p, {}, parts};
  q.scratch.here = p.scratch;
  q.scratch.histogram = q.scratch.here + int64_t{p.ranks} * p.tokens * p.top_k;
  q.scratch.kept = q.scratch.histogram + p.ranks * parts * all;
  q.scratch.base = q.scratch.kept + all;
  q.scratch.counts = q.scratch.base + all;
  const dim3 grid(parts, p.ranks);
  const size_t warps_bytes = kWarps * all * sizeof(uint16_t);
  const cudaError_t error = cuda::AllowSharedBytes(PlaceKernel, warps_bytes);
  if (error != cudaSuccess) return error;
  CountKernel<<<grid, kThreads, all * sizeof(int32_t), stream>>>(q);
  LayOutKernel<<<p.ranks, kThreads, 2 * p.experts * sizeof(int32_t), stream>>>(q);
  PlaceKernel<<<grid, kThreads, warps_bytes, stream>>>(q);
  TallyKernel<<<grid, kThreads, 0, stream>>>(q);
  ReceiveKernel<<<grid, kThreads, 0, stream>>>(q);
  return cudaGetLastError();
}

}  // namespace nccl
}  // namespace ep_runtime
