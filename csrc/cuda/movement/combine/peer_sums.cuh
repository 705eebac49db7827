// combine's sums for peers, of this rank's rows for the peers' tokens.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PEER_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PEER_SUMS_CUH_

#include "cuda/movement/call/staged_rows.cuh"
#include "cuda/movement/combine/landed_sums.cuh"
#include "cuda/movement/combine/part_sums.cuh"
#include "cuda/movement/combine/work.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr int kPeerTicket = kEmptyTicket;  // combine has no empty rows, so their counter is free

// The sums that peers wait for, of all their tokens of this pass, with the peers in turn.
template <CombinePrecision kPrecision, bool kWeighted>
struct PeerSums {
  const DeviceCall& call;
  const CombineParams& params;
  SourceCounts counts;
  SumPlaces places;
  LandedSums<kSenders>* landed;
  WorkNumbers numbers;
  int32_t skip;
  int32_t count;
  int32_t most;
  int32_t partial_bytes;
  int32_t slices;

  // `warp` is this warp's number among the `warps` warps that start with this work.
  __device__ PeerSums(const DeviceCall& c, const CombineParams& p, const Pass& pass, int32_t of_row,
                      LandedSums<kSenders>* l, uint32_t warp, uint32_t warps)
      : call(c),
        params(p),
        counts(c, p.plan, p.sizes.tokens, CountColumns(pass.packed, c.ranks)),
        places(c, p, pass, threadIdx.x % 32, c.me, PartialBytes<kPrecision>(p)),
        landed(l),
        numbers{kPeerTicket, warps, warp},
        slices(of_row) {
    const int lane = threadIdx.x % 32;
    const int columns = CountColumns(pass.packed, call.ranks);
    const int32_t half = lane < call.ranks ? params.plan.recv_count[lane * columns + 2] : 0;
    const int32_t first_half = min(max(half, 0), counts.staged);
    skip = pass.half == 2 ? first_half : 0;
    count = min(pass.half == 1 ? first_half : counts.staged - skip, places.room);
    most = __reduce_max_sync(~0u, count);
    partial_bytes = PartialBytes<kPrecision>(params);
  }

  __device__ void Draw() { numbers.Draw(call); }
  __device__ bool Fetch(Item* item) {
    const uint32_t peers = call.ranks - 1;
    for (; peers > 0; Draw()) {
      const uint32_t drawn = numbers.Get(), number = drawn / slices;
      if (number / peers >= static_cast<uint32_t>(most)) return false;
      const auto staged = static_cast<int32_t>(number / peers);
      const int source = (call.me + 1 + static_cast<int>(number % peers)) % call.ranks;
      if (staged >= __shfl_sync(~0u, count, source)) continue;
      const int64_t first = __shfl_sync(~0u, counts.first + skip, source);
      StagedRow entries{};
      entries.ReadBounds(params.plan, first + staged);
      entries.ReadEntries(params.plan, params.sizes);
      entries.CheckEntries(params.sizes);
      const bool real = static_cast<int>(threadIdx.x % 32) < entries.count;
      // An invalid row, which prepare did not write, leaves the item empty.
      const bool good = __all_sync(~0u, !real || entries.row >= 0);
      item->count = good ? entries.count : 0;
      item->own = ~0u;
      item->row = entries.row;
      item->slot = entries.slot;
      item->part = static_cast<const uint8_t*>(params.rows) +
                   int64_t{max(entries.row, 0)} * params.row_bytes;
      item->weight = kWeighted && entries.row >= 0 ? params.weights[entries.row] : 1.0f;
      item->rank = source;
      item->staged = staged;
      item->slice = static_cast<int32_t>(drawn % slices);
      item->out = PointerOf(source, places.first) + int64_t{staged} * partial_bytes;
      return true;
    }
    return false;
  }
  __device__ bool Ready(const Item&) const { return true; }
  __device__ bool Await(const Item&) const { return true; }
  __device__ void Finish(const Item& item) {
    const int lane = threadIdx.x % 32;
    if (params.d_weights != nullptr && item.slice == 0 && lane < item.count) {
      auto* sent = reinterpret_cast<float*>(call.Entries(item.rank, call.me));
      sent[int64_t{item.staged} * params.sizes.top_k + item.slot] = params.d_weights[item.row];
    }
    __syncwarp();
    if (lane == 0) {
      landed->Land(threadIdx.x / 32, {item.rank, item.staged * slices + item.slice});
    }
  }
};

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PEER_SUMS_CUH_
