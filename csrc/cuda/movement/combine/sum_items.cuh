// A warp sums the parts of its items, and loads the next item's parts meanwhile.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_SUM_ITEMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_SUM_ITEMS_CUH_

#include "cuda/movement/combine/part_sums.cuh"
#include "cuda/movement/combine/piece_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr uint32_t kRareWord = 0x9E3779B9;  // any word will do

// Sums one piece of an item, and keeps the ring full with `refill` meanwhile.
template <RowType kType, CombinePrecision kPrecision, bool kWeighted, bool kForPeer,
          typename Refill>
__device__ __forceinline__ void SumPiece(PartRing<kType, kPrecision>* ring, const Item& item,
                                         int piece, const Refill& refill) {
  const int vectors = min(kPieceBytes, ring->row_bytes - piece * kPieceBytes) / 16;
  // The copy engine overwrites a slot right after `done`, so all lanes' reads of it must be over. A
  // sync does not wait for reads, which may queue behind stores for longer than a load takes. A
  // vote on what was read does. A fence would also do, but it waits for stores, too.
  const auto done = [&](uint32_t read) {
    if (__any_sync(~0u, read == kRareWord)) FenceProxyAsync();
    __syncwarp();
    ++ring->used;
    refill();
  };
  Sums<kType> own;
  Clear<kType>(own);
  if constexpr (kForPeer) {
    for (int part = 0; part < item.count; ++part) {
      PartVectors<kType, false> x;
      x.Read(ring->Await(), vectors);
      done(x.Mixed());
      x.template AddTo<kWeighted>(__shfl_sync(~0u, item.weight, part), own);
    }
    using SentSum = Sent<kType, kPrecision>;
    uint8_t* out = item.out + SentSum::Bytes(int64_t{piece} * kPieceBytes);
    StoreSent<kType, kPrecision>(own, out, vectors);
  } else {
    Sums<kType> sums;
    Clear<kType>(sums);
    for (int part = 0; part < item.count; ++part) {
      if ((item.own >> part & 1) == 0) {
        AddSent<kType, kPrecision>(ring->Await(), vectors, done, sums);
        continue;
      }
      PartVectors<kType, false> x;
      x.Read(ring->Await(), vectors);
      done(x.Mixed());
      x.template AddTo<kWeighted>(__shfl_sync(~0u, item.weight, part), own);
      const bool last = part + 1 == item.count || (item.own >> (part + 1) & 1) == 0;
      if (last) AddOwn<kType, kPrecision>(own, sums);
    }
    if constexpr (Sent<kType, kPrecision>::kWide) {
      if (ring->wide_out) {
        StoreSums<kType, true>(sums, item.out + int64_t{piece} * kPieceBytes * 2, vectors);
        return;
      }
    }
    StoreSums<kType, false>(sums, item.out + int64_t{piece} * kPieceBytes, vectors);
  }
}

// Sums all items of a warp. `source` has: the slices of a row; bool Fetch(Item*), which reads the
// item drawn last; Draw(), which draws the next; bool Ready(item), which does not wait; bool
// Await(item), which waits; and Finish(item), after its sums are stored.
template <RowType kType, CombinePrecision kPrecision, bool kWeighted, bool kForPeer,
          typename Source>
__device__ void SumItems(PartRing<kType, kPrecision>& ring, Source& source) {
  const int pieces = (ring.row_bytes + kPieceBytes - 1) / kPieceBytes;
  Item item;
  if (!source.Fetch(&item) || !source.Await(item)) return;
  source.Draw();
  Cursor at{item.First(pieces, source.slices), 0};
  while (true) {
    const int end = item.End(pieces, source.slices);
    while (!ring.Full() && !at.Done(item, end)) {
      ring.Issue(item, at);
      at.Advance(item);
    }
    Item next;
    const bool more = source.Fetch(&next);
    const bool ready = more && source.Ready(next);
    const int next_end = more ? next.End(pieces, source.slices) : 0;
    Cursor next_at{more ? next.First(pieces, source.slices) : 0, 0};
    const auto refill = [&]() {
      if (!at.Done(item, end)) {
        ring.Issue(item, at);
        at.Advance(item);
      } else if (ready && !next_at.Done(next, next_end)) {
        ring.Issue(next, next_at);
        next_at.Advance(next);
      }
    };
    for (int piece = item.First(pieces, source.slices); piece < end; ++piece) {
      // Draw this late, so that a slow warp holds no more than the item it sums and the item it
      // loads.
      if (more && piece + 1 == end) source.Draw();
      SumPiece<kType, kPrecision, kWeighted, kForPeer>(&ring, item, piece, refill);
    }
    source.Finish(item);
    if (!more || (!ready && !source.Await(next))) break;
    item = next;
    at = next_at;
  }
  // Issued loads must land before the ring is used again or its memory reused.
  for (; ring.used < ring.issued; ++ring.used) ring.Await();
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_SUM_ITEMS_CUH_
