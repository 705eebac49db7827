// The receiving half of dispatch and of combine's backward: where arrived rows go.
#ifndef EP_RUNTIME_CUDA_PLACE_ROWS_CUH_
#define EP_RUNTIME_CUDA_PLACE_ROWS_CUH_

#include "cuda/call.cuh"

namespace ep_runtime {
namespace cuda {

// Lane j holds source j's counts; the staged rows of all sources are numbered through.
struct SourceCounts {
  int32_t staged;
  int32_t first;  // staged rows of earlier sources
  int32_t most;   // of any one source

  // Staged rows [skip, skip + staged) of each source count: those of one half of the tokens.
  __device__ SourceCounts(const Call& call, const Plan& plan, int tokens) {
    const int lane = threadIdx.x % 32;
    staged = lane < call.ranks ? plan.recv_count[lane * 4] : 0;
    staged = min(max(staged, 0), tokens);
    int32_t sum = staged;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    first = sum - staged;
    most = __reduce_max_sync(~0u, staged);
  }
};

// Tells the board how many rows this rank receives; by one whole warp.
__device__ inline void CountReceived(const Call& call, const CallName& name, const Plan& plan) {
  const int lane = threadIdx.x % 32;
  const int32_t rows =
      __reduce_add_sync(~0u, lane < call.ranks ? plan.recv_count[lane * 4 + 1] : 0);
  if (lane == 0) CountRows(call.group, BoardIndex(name), rows, 0);
}

// The entries of one staged row; lane i holds the i-th.
struct EntryRows {
  int count;
  int32_t row;
  int32_t slot;
};

__device__ inline EntryRows ReadEntries(const Plan& plan, const CallSizes& sizes, int64_t staged) {
  const int lane = threadIdx.x % 32;
  const int32_t begin = plan.staged_start[staged];
  const int32_t end = plan.staged_start[staged + 1];
  EntryRows entries{0, -1, 0};
  if (begin < 0 || end > sizes.capacity || end < begin) return entries;
  entries.count = min(end - begin, sizes.top_k);
  if (lane < entries.count) {
    entries.row = plan.staged_row[begin + lane];
    entries.slot = plan.staged_slot[begin + lane];
    // A plan is an ordinary array: nothing is written by its numbers unseen.
    if (static_cast<uint32_t>(entries.row) >= static_cast<uint32_t>(sizes.capacity)) {
      entries.row = -1;
    }
    if (static_cast<uint32_t>(entries.slot) >= static_cast<uint32_t>(sizes.top_k)) {
      entries.row = -1;
    }
  }
  return entries;
}

// Calls visit(row) for the padding rows that are warp `warp`'s share; returns the end of the last
// zone. The whole warp calls it and visits together.
template <typename Visit>
__device__ int VisitPadding(const Plan& plan, const CallSizes& sizes, int warp, int warps,
                            const Visit& visit) {
  const int lane = threadIdx.x % 32;
  int base = 0;
  int seen = 0;
  for (int start = 0; start < sizes.experts; start += 32) {
    const bool real = start + lane < sizes.experts;
    const int32_t kept = real ? plan.kept[start + lane] : 0;
    const int32_t zone = real ? plan.group_sizes[start + lane] : 0;
    for (int e = 0; e < min(32, sizes.experts - start); ++e) {
      const int rows = __shfl_sync(~0u, kept, e);
      const int size = __shfl_sync(~0u, zone, e);
      if (rows >= 0 && size >= rows && base + size <= sizes.capacity) {
        const int padding = size - rows;
        int i = (warp - seen % warps + warps) % warps;
        for (; i < padding; i += warps) visit(base + rows + i);
        seen += padding;
        base += size;
      }
    }
  }
  return base;
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_PLACE_ROWS_CUH_
