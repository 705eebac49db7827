// combine's sums of this rank's tokens: of peers' sums as they arrive, and of this rank's rows.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_TOKEN_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_TOKEN_SUMS_CUH_

#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/combine/part_sums.cuh"
#include "cuda/movement/combine/work.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

__device__ inline void ReadWeightGrads(const DeviceCall& call, const CombineParams& params,
                                       int32_t rank, int64_t slot, int32_t staged) {
  const int lane = threadIdx.x % 32;
  const int32_t at = __shfl_sync(~0u, staged, rank & 31);
  if (lane >= params.sizes.top_k) return;
  float value = 0.0f;
  if (rank == call.me) {
    const int32_t row = params.plan.dst_row[slot];
    if (static_cast<uint32_t>(row) < static_cast<uint32_t>(params.sizes.capacity)) {
      value = params.d_weights[row];
    }
  } else if (rank >= 0 && at >= 0) {
    const auto* sent = reinterpret_cast<const float*>(call.Entries(call.me, rank));
    value = __ldcg(&sent[int64_t{at} * params.sizes.top_k + lane]);
  }
  params.d_topk_weights[slot] = value;
}

template <CombinePrecision kPrecision>
__device__ int32_t TokenBytes(const CombineParams& params) {
  return kPrecision == CombinePrecision::kExact && params.wide_tokens ? params.sizes.width * 4
                                                                      : params.row_bytes;
}

// Sums this rank's own tokens, in order.
template <CombinePrecision kPrecision, bool kWeighted>
struct TokenSums {
  const DeviceCall& call;
  const CombineParams& params;
  const Pass& pass;
  WorkNumbers numbers;
  SumPlaces places;
  TokenCounter counter;
  int32_t slices;
  int32_t partial_bytes;
  int32_t token_bytes;

  __device__ TokenSums(const DeviceCall& c, const CombineParams& p, const Pass& tokens,
                       int32_t of_row, const WorkNumbers& first)
      : call(c),
        params(p),
        pass(tokens),
        numbers(first),
        places(c, p, tokens, c.me, threadIdx.x % 32, PartialBytes<kPrecision>(p)),
        counter(ScratchBlockCounts(c), c.ranks, tokens.end - tokens.begin),
        slices(of_row) {
    partial_bytes = PartialBytes<kPrecision>(params);
    token_bytes = TokenBytes<kPrecision>(params);
  }

  __device__ void Draw() { numbers.Draw(call); }
  __device__ bool Fetch(Item* item) {
    const int tokens = pass.end - pass.begin;
    const uint32_t drawn = numbers.Get();
    if (drawn >= static_cast<uint32_t>(tokens * slices)) return false;
    const int lane = threadIdx.x % 32;
    const auto number = static_cast<int32_t>(drawn / slices);
    item->slice = static_cast<int32_t>(drawn % slices);
    item->token = pass.begin + number;
    const int64_t slot = int64_t{item->token} * params.sizes.top_k + lane;
    item->rank = -1;
    int32_t row = -1;
    // Issue these reads before the counter waits for its own reads.
    if (lane < params.sizes.top_k) {
      item->rank = params.plan.dst_rank[slot];
      row = params.plan.dst_row[slot];
    }
    item->staged =
        counter.Number(DstRankOf(params, pass), params.sizes.top_k, call.ranks, tokens, number);
    if (item->staged >= places.room) item->staged = -1;
    if (item->rank >= call.ranks) item->rank = -1;
    const bool good = static_cast<uint32_t>(row) < static_cast<uint32_t>(params.sizes.capacity);
    if (item->rank != call.me || !good) row = -1;
    // Parts in order: lower ranks, own rows, higher ranks.
    const uint32_t own = __ballot_sync(~0u, row >= 0);
    const uint32_t ranks = __ballot_sync(~0u, item->staged >= 0) & ~(1u << call.me);
    const uint32_t lower = ranks & ((1u << call.me) - 1);
    const int before = __popc(lower);
    const int rows = __popc(own);
    item->count = before + rows + __popc(ranks & ~lower);
    item->own = (rows == 32 ? ~0u : (1u << rows) - 1) << before;
    const bool mine = lane >= before && lane < before + rows;
    const int which = mine ? lane - before : lane < before ? lane : lane - rows;
    const int from = __fns(mine ? own : ranks, 0, which + 1) & 31;
    const int32_t own_row = __shfl_sync(~0u, row, from);
    const int32_t staged = __shfl_sync(~0u, item->staged, from);
    item->row = own_row;
    const uint8_t* sums = PointerOf(from, places.first);
    item->part = mine ? static_cast<const uint8_t*>(params.rows) +
                            int64_t{max(own_row, 0)} * params.row_bytes
                      : sums + int64_t{max(staged, 0)} * partial_bytes;
    item->weight = kWeighted && mine ? params.weights[own_row] : 1.0f;
    item->out = static_cast<uint8_t*>(params.tokens) + int64_t{item->token} * token_bytes;
    return true;
  }
  __device__ bool Wanted(const Item& item) const {
    return item.staged >= 0 && static_cast<int>(threadIdx.x % 32) != call.me;
  }
  __device__ const uint32_t* Flag(const Item& item) const {
    return call.Ready(call.me, threadIdx.x % 32) + item.staged * slices + item.slice;
  }
  __device__ bool Ready(const Item& item) const {
    return Arrived(!Wanted(item) || LoadAcquireSys(Flag(item)) == call.tag);
  }
  __device__ bool Await(const Item& item) const {
    bool alive = true;
    if (Wanted(item)) {
      alive = AwaitWord(call, Flag(item), call.tag, static_cast<int>(threadIdx.x % 32));
    }
    return Arrived(alive);
  }
  // Peers' threads store partial sums, and this rank's copy engine loads them for other lanes than
  // the lanes that saw the flags. So the lanes sync and execute a proxy fence.
  __device__ bool Arrived(bool here) const {
    const bool all = __all_sync(~0u, here);
    __syncwarp();
    FenceProxyAsync();
    return all;
  }
  __device__ void Finish(const Item& item) const {
    if (params.d_weights == nullptr || item.slice != 0) return;
    const int64_t slot = int64_t{item.token} * params.sizes.top_k + threadIdx.x % 32;
    ReadWeightGrads(call, params, item.rank, slot, item.staged);
  }
};

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_TOKEN_SUMS_CUH_
