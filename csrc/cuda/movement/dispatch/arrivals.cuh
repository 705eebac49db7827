// Finds the staged rows that arrive for a warp, and the tokens that stay on this rank.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_ARRIVALS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_ARRIVALS_CUH_

#include "cuda/movement/call/staged_rows.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

__device__ inline const uint32_t* FlagOf(const DeviceCall& call, const StagedRow& row) {
  return call.Ready(call.me, row.source) + row.staged;
}

// The staged rows of one warp, every `step`-th, in the order of their numbers.
struct StagedRows {
  const DeviceCall& call;
  const Plan& plan;
  const Arriving& arriving;
  int next;
  int step;

  __device__ StagedRow Next() {
    const int total = call.ranks > 1 ? arriving.most * (call.ranks - 1) : 0;
    StagedRow row{};
    row.staged = -1;
    while (row.staged < 0 && next < total) {
      row.Find(call, plan, arriving, next);
      next += step;
    }
    return row;
  }
};

// Tokens of this rank, in order. Every idle warp takes the next token, and reads ahead.
struct OwnTokens {
  const DeviceCall& call;
  const Plan& plan;
  const CallSizes& sizes;
  uint32_t ticket;     // valid in lane 0
  int32_t token = -1;  // -1: there is none
  int32_t rank = -1;   // lane k: rank of slot k
  int32_t row = -1;

  // Without `all` it has no tokens, because another launch of the call places them.
  __device__ OwnTokens(const DeviceCall& c, const Plan& p, const CallSizes& s, bool all)
      : call(c), plan(p), sizes(s), ticket(0) {
    if (!all) return;
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
  // Returns in lane k the row of slot k if the row is on this rank, else -1.
  __device__ int32_t OwnRow() const {
    const bool good = static_cast<uint32_t>(row) < static_cast<uint32_t>(sizes.capacity);
    return rank == call.me && good ? row : -1;
  }
};

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_ARRIVALS_CUH_
