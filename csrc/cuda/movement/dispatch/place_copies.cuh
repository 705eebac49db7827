// The receiving half of dispatch: places arriving rows, and this rank's own, in the slab.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_COPIES_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_COPIES_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/staged_rows.cuh"
#include "cuda/movement/dispatch/arrivals.cuh"
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/movement/dispatch/empty_rows.cuh"
#include "cuda/movement/dispatch/push_rows.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

// A row to copy, and in each lane a slab row that gets a copy.
struct PlaceItem {
  const uint8_t* from;
  int32_t row;  // -1: none
  float weight;
};

// Items that a warp copies: its staged rows as they arrive, and this rank's own tokens in between.
struct PlaceItems {
  const DeviceCall& call;
  const DispatchParams& params;
  StagedRows& rows;
  OwnTokens own;
  StagedRow arrival;
  StagedRow after;

  __device__ PlaceItems(const DeviceCall& c, const DispatchParams& p, StagedRows& r, bool first)
      : call(c), params(p), rows(r), own(c, p.plan, p.sizes, first) {
    arrival = rows.Next();
    arrival.ReadEntries(params.plan, params.sizes);
    after = rows.Next();
  }

  // Takes the next item that has arrived. If none has, waits for one, or without `wait` returns
  // false. After a wait, false means that all items are done or that the call failed.
  __device__ bool Take(bool wait, PlaceItem* item) {
    if (arrival.staged >= 0 && Arrived()) return TakeArrival(item);
    for (; own.token >= 0; own.Advance()) {
      item->row = own.OwnRow();
      if (!__any_sync(~0u, item->row >= 0)) continue;
      item->from =
          static_cast<const uint8_t*>(params.tokens) + int64_t{own.token} * params.row_bytes;
      item->weight = 1.0f;
      if (params.weights != nullptr && item->row >= 0) {
        item->weight = params.weights[int64_t{own.token} * params.sizes.top_k + threadIdx.x % 32];
      }
      own.Advance();
      return true;
    }
    if (!wait || arrival.staged < 0) return false;
    bool alive = true;
    if (threadIdx.x % 32 == 0) {
      alive = AwaitWord(call, FlagOf(call, arrival), call.tag, arrival.source);
    }
    if (__shfl_sync(~0u, alive, 0) == 0) return false;
    __syncwarp();
    return TakeArrival(item);
  }

 private:
  __device__ bool Arrived() const {
    const bool here = __all_sync(~0u, LoadAcquireSys(FlagOf(call, arrival)) == call.tag);
    __syncwarp();
    return here;
  }
  __device__ bool TakeArrival(PlaceItem* item) {
    arrival.CheckEntries(params.sizes);
    item->from = rows.arriving.places.At(arrival.source, arrival.staged, params.row_bytes);
    item->row = arrival.row;
    item->weight = 1.0f;
    if (params.weights != nullptr && arrival.row >= 0) {
      const auto* sent = reinterpret_cast<const float*>(call.Entries(call.me, arrival.source));
      item->weight = __ldcg(&sent[int64_t{arrival.staged} * params.sizes.top_k + arrival.slot]);
    }
    arrival = after;
    arrival.ReadEntries(params.plan, params.sizes);
    after = rows.Next();
    return true;
  }
};

__device__ inline SlabArrays RowsOf(const DispatchParams& params) {
  return {static_cast<uint8_t*>(params.recv), static_cast<uint8_t*>(params.recv_scale),
          params.row_bytes, params.scale_bytes};
}

// Stores one piece of an item from `buffer` to every slab row of the item.
__device__ inline void StorePiece(const PlaceItem& item, const DispatchParams& params,
                                  uint32_t offset, const uint8_t* buffer, uint32_t bytes) {
  const int lane = threadIdx.x % 32;
  const SlabArrays rows = RowsOf(params);
  for (uint32_t left = __ballot_sync(~0u, item.row >= 0); left != 0; left &= left - 1) {
    const int64_t to = __shfl_sync(~0u, item.row, __ffs(left) - 1);
    if (lane == 0) rows.Store(to, offset, buffer, bytes);
  }
  if (lane == 0) CommitStores();
}

// Copies a warp's items to their slab rows. Loads the next item while this one is stored. `first`
// pieces went through the ring before, and their copies are complete. `own`: whether this rank's
// tokens are among the items.
__device__ void PlaceRows(const DeviceCall& call, const DispatchParams& params, const Ring& ring,
                          int pieces, int first, StagedRows& rows, bool own) {
  const int lane = threadIdx.x % 32;
  PlaceItems items(call, params, rows, own);
  const auto bytes_at = [&](int piece) {
    return min(ring.piece_bytes, params.row_bytes - piece * ring.piece_bytes);
  };
  int loaded = first;  // pieces
  const auto load = [&](const PlaceItem& item, int piece) {
    const int slot = loaded++ % kBuffers;
    if (lane != 0) return;
    FenceProxyAsync();
    WaitStoresRead<kBuffers - 2>();
    ring.barriers[slot].Load(ring.Buffer(slot), item.from + piece * ring.piece_bytes,
                             bytes_at(piece));
  };
  int stored = first;  // pieces
  PlaceItem item;
  bool more = items.Take(true, &item);
  if (more) load(item, 0);
  while (more) {
    PlaceItem next;
    more = false;
    for (int piece = 0; piece < pieces; ++piece, ++stored) {
      const int slot = stored % kBuffers;
      if (piece + 1 < pieces) {
        load(item, piece + 1);
      } else {
        more = items.Take(false, &next);
        if (more) load(next, 0);
      }
      if (lane == 0) ring.barriers[slot].Wait(stored / kBuffers & 1);
      StorePiece(item, params, piece * ring.piece_bytes, ring.Buffer(slot), bytes_at(piece));
    }
    if (params.recv_weights != nullptr && item.row >= 0) {
      params.recv_weights[item.row] = item.weight;
    }
    if (!more) {
      more = items.Take(true, &next);
      if (more) load(next, 0);
    }
    item = next;
  }
  if (lane == 0) WaitStores<0>();
  __syncwarp();
}

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_COPIES_CUH_
