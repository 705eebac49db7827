// The receiving half of dispatch and of combine's backward: which rows arrive, and where they go.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_

#include "cuda/movement/call/call.cuh"

namespace ep_runtime {
namespace cuda {

// Lane j holds source j's counts; the staged rows of all sources are numbered through.
struct SourceCounts {
  int32_t staged;
  int32_t first;  // staged rows of earlier sources
  int32_t most;   // of any one peer

  __device__ SourceCounts(const DeviceCall& call, const Plan& plan, int tokens) {
    const int lane = threadIdx.x % 32;
    staged = lane < call.ranks ? plan.recv_count[lane * 4] : 0;
    staged = min(max(staged, 0), tokens);
    int32_t sum = staged;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    first = sum - staged;
    most = __reduce_max_sync(~0u, lane == call.me ? 0 : staged);
  }
};

// Tells the board how many rows this rank receives, and how many were dropped where another prepare
// than this library's made the plan; by one whole warp.
__device__ inline void CountReceived(const DeviceCall& call, const CallName& name,
                                     const Plan& plan) {
  const int lane = threadIdx.x % 32;
  const int32_t rows =
      __reduce_add_sync(~0u, lane < call.ranks ? plan.recv_count[lane * 4 + 1] : 0);
  if (lane == 0) CountRows(call.group, BoardIndex(name), rows, max(plan.recv_count[3], 0));
}

// A staged row of a peer and its entries; lane i holds the i-th.
struct StagedRow {
  int32_t source;
  int32_t staged;  // -1: there is none
  int32_t begin;
  int32_t end;
  int count;
  int32_t row;  // -1: no entry
  int32_t slot;

  // Number `item` of all peers' staged rows, sources in turn, which is about the order of arrival;
  // none where that source has fewer. Reads where its entries are.
  __device__ void Find(const DeviceCall& call, const Plan& plan, const SourceCounts& counts,
                       int item) {
    const int peers = call.ranks - 1;
    const int number = item / peers;
    source = call.me + 1 + item % peers;
    if (source >= call.ranks) source -= call.ranks;
    staged = number < __shfl_sync(~0u, counts.staged, source) ? number : -1;
    const int64_t at = __shfl_sync(~0u, counts.first, source) + int64_t{number};
    if (staged >= 0) ReadBounds(plan, at);
  }
  // `at`: the staged row's number among those of all sources.
  __device__ void ReadBounds(const Plan& plan, int64_t at) {
    begin = plan.staged_start[at];
    end = plan.staged_start[at + 1];
  }
  __device__ void ReadEntries(const Plan& plan, const CallSizes& sizes) {
    const int lane = threadIdx.x % 32;
    const bool good = begin >= 0 && end <= sizes.capacity && end >= begin;
    count = good ? min(end - begin, sizes.top_k) : 0;
    row = lane < count ? plan.staged_row[begin + lane] : -1;
    slot = lane < count ? plan.staged_slot[begin + lane] : 0;
  }
  // A plan is an ordinary array: nothing is written by its numbers unseen.
  __device__ void CheckEntries(const CallSizes& sizes) {
    if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(sizes.capacity) ||
        static_cast<uint32_t>(slot) >= static_cast<uint32_t>(sizes.top_k)) {
      row = -1;
    }
  }
};

// The staged rows of one warp of `step` warps, in the order of their numbers.
struct StagedRows {
  const DeviceCall& call;
  const Plan& plan;
  const SourceCounts& counts;
  int next;
  int step;

  __device__ StagedRow Next() {
    const int total = call.ranks > 1 ? counts.most * (call.ranks - 1) : 0;
    StagedRow row{};
    row.staged = -1;
    while (row.staged < 0 && next < total) {
      row.Find(call, plan, counts, next);
      next += step;
    }
    return row;
  }
};

// Tokens of this rank, in order; every warp that has time takes the next. Reads run ahead of use.
struct OwnTokens {
  const DeviceCall& call;
  const Plan& plan;
  const CallSizes& sizes;
  uint32_t ticket;     // lane 0's
  int32_t token = -1;  // -1: there is none
  int32_t rank = -1;   // lane k: of slot k
  int32_t row = -1;

  __device__ OwnTokens(const DeviceCall& c, const Plan& p, const CallSizes& s)
      : call(c), plan(p), sizes(s), ticket(0) {
    Draw();
    Advance();
  }
  __device__ void Draw() {
    if (threadIdx.x % 32 == 0) ticket = TakeTicketAlone(call, kItemTicket);
  }
  __device__ void Advance() {
    const uint32_t drawn = __shfl_sync(~0u, ticket, 0);
    if (drawn >= static_cast<uint32_t>(sizes.tokens)) {
      token = -1;
      return;
    }
    Draw();
    const int lane = threadIdx.x % 32;
    token = static_cast<int32_t>(drawn);
    rank = row = -1;
    if (lane < sizes.top_k) {
      const int64_t slot = int64_t{token} * sizes.top_k + lane;
      rank = plan.dst_rank[slot];
      row = plan.dst_row[slot];
    }
  }
  // Lane k: the row of slot k where it is one of this rank, else -1.
  __device__ int32_t OwnRow() const {
    const bool good = static_cast<uint32_t>(row) < static_cast<uint32_t>(sizes.capacity);
    return rank == call.me && good ? row : -1;
  }
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_
