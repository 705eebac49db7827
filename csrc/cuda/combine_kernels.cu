#include "cuda/bulk_copy.cuh"
#include "cuda/combine_kernels.h"
#include "cuda/place_rows.cuh"
#include "cuda/row_math.cuh"
#include "cuda/staged_index.cuh"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = 4;                      // of a row that a lane sums at a time
constexpr int kPieceBytes = 32 * 16 * kVectors;  // of a row that a warp sums at a time
constexpr int kRingBytes = 12 * 1024;            // of a warp
constexpr int kMaxSlots = kRingBytes / kPieceBytes;

// The tokens of one launch: all, or one half.
struct Pass {
  int32_t begin;
  int32_t end;
  int32_t half;  // 0: all, 1: first, 2: second
};

// What one warp sums: rows of this rank, in slot order, and partial sums of other ranks, in rank
// order around them. Lane i holds the i-th part.
struct Item {
  const uint8_t* part;
  float weight;
  uint32_t own;  // bit i: the part is a row of this rank
  int count;
  uint8_t* out;
  int32_t rank;    // of the peer that gets the sum; lane k: rank of the token's slot k
  int32_t staged;  // there; lane r: staged row on rank r
  int32_t slot;    // lane i: slot of the i-th part's row
  int32_t row;     // lane i: row of the i-th part
  int64_t token;
};

// A warp's place in the list of its loads: parts of piece 0, parts of piece 1, ...
struct Cursor {
  int piece;
  int part;
  __device__ bool Done(const Item& item, int pieces) const {
    return item.count == 0 || piece >= pieces;
  }
  __device__ void Advance(const Item& item) {
    if (++part < item.count) return;
    part = 0;
    ++piece;
  }
};

template <RowType kType>
using Sums = float[kVectors][Element<kType>::kPerVector];

template <RowType kType>
__device__ __forceinline__ void Clear(Sums<kType>& sums) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int j = 0; j < Element<kType>::kPerVector; ++j) sums[u][j] = 0.0f;
  }
}

// The loads of one warp, several parts ahead of their use. The lane that holds a part loads it.
template <RowType kType, bool kExact>
struct PartRing {
  static constexpr int kWide = kExact ? 4 * Element<kType>::kPerVector / 16 : 1;
  static constexpr int kSlotBytes = kPieceBytes * kWide;
  static constexpr int kSlots = kRingBytes / kSlotBytes;

  uint8_t* data;
  LoadBarrier* barriers;
  int row_bytes;
  int issued;
  int used;

  __device__ bool Full() const { return issued - used >= kSlots; }
  __device__ void Issue(const Item& item, const Cursor& at) {
    const int slot = issued++ % kSlots;
    if (static_cast<int>(threadIdx.x % 32) != at.part) return;
    const int wide = (item.own >> at.part & 1) != 0 ? 1 : kWide;
    const int64_t offset = int64_t{at.piece} * kPieceBytes;
    const int bytes = min(kPieceBytes, row_bytes - static_cast<int>(offset)) * wide;
    barriers[slot].Load(data + slot * kSlotBytes, item.part + offset * wide, bytes);
  }
  __device__ const uint8_t* Await() {
    const int slot = used % kSlots;
    barriers[slot].Wait(used / kSlots & 1);
    return data + slot * kSlotBytes;
  }
};

// A lane's share of one part's piece.
template <RowType kType, bool kWide>
struct PartVectors {
  using E = Element<kWide ? RowType::kF32 : kType>;
  static constexpr int kWords = Element<kType>::kPerVector / E::kPerVector;
  uint4 words[kVectors][kWords];

  __device__ __forceinline__ void Read(const uint8_t* part, int vectors) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = u * 32 + static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[u][i] = index < vectors ? reinterpret_cast<const uint4*>(part)[index * kWords + i]
                                      : make_uint4(0, 0, 0, 0);
      }
    }
  }
  template <bool kWeighted>
  __device__ __forceinline__ void AddTo(float weight, Sums<kType>& sums) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float x[E::kPerVector];
        E::Unpack(words[u][i], x);
#pragma unroll
        for (int j = 0; j < E::kPerVector; ++j) {
          float& sum = sums[u][i * E::kPerVector + j];
          sum = __fadd_rn(sum, kWeighted ? __fmul_rn(weight, x[j]) : x[j]);
        }
      }
    }
  }
};

// sums += own, rounded as a partial sum that travels is rounded.
template <RowType kType, bool kExact>
__device__ __forceinline__ void AddOwn(Sums<kType>& own, Sums<kType>& sums) {
  using E = Element<kType>;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if constexpr (!kExact) E::Unpack(E::Pack(own[u]), own[u]);
#pragma unroll
    for (int j = 0; j < E::kPerVector; ++j) sums[u][j] = __fadd_rn(sums[u][j], own[u][j]);
  }
}

// Stores the sums of a piece: in f32 where `wide`, else in the row type.
template <RowType kType, bool kWide>
__device__ __forceinline__ void StoreSums(const Sums<kType>& sums, uint8_t* out, int vectors) {
  using E = Element<kType>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int index = u * 32 + lane;
    if (index >= vectors) continue;
    if constexpr (kWide && E::kPerVector == 8) {
      StoreVector(out + index * 32, Element<RowType::kF32>::Pack(&sums[u][0]));
      StoreVector(out + index * 32 + 16, Element<RowType::kF32>::Pack(&sums[u][4]));
    } else {
      StoreVector(out + index * 16, E::Pack(sums[u]));
    }
  }
}

// Sums one piece of an item, keeping the ring full with `refill` on the way.
template <RowType kType, bool kExact, bool kWeighted, bool kForPeer, typename Refill>
__device__ __forceinline__ void SumPiece(PartRing<kType, kExact>* ring, const Item& item, int piece,
                                         const Refill& refill) {
  const int vectors = min(kPieceBytes, ring->row_bytes - piece * kPieceBytes) / 16;
  const auto done = [&]() {
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
      done();
      x.template AddTo<kWeighted>(__shfl_sync(~0u, item.weight, part), own);
    }
    constexpr int kWide = PartRing<kType, kExact>::kWide;
    StoreSums<kType, kExact>(own, item.out + int64_t{piece} * kPieceBytes * kWide, vectors);
  } else {
    Sums<kType> sums;
    Clear<kType>(sums);
    for (int part = 0; part < item.count; ++part) {
      if ((item.own >> part & 1) == 0) {
        PartVectors<kType, kExact> x;
        x.Read(ring->Await(), vectors);
        done();
        x.template AddTo<false>(1.0f, sums);
        continue;
      }
      PartVectors<kType, false> x;
      x.Read(ring->Await(), vectors);
      done();
      x.template AddTo<kWeighted>(__shfl_sync(~0u, item.weight, part), own);
      const bool last = part + 1 == item.count || (item.own >> (part + 1) & 1) == 0;
      if (last) AddOwn<kType, kExact>(own, sums);
    }
    StoreSums<kType, false>(sums, item.out + int64_t{piece} * kPieceBytes, vectors);
  }
}

// Runs a warp's items. `source` has: bool Fetch(Item*) for the next item, bool Ready(item) that
// does not wait, bool Await(item) that does, and Finish(item) after its sums are stored.
template <RowType kType, bool kExact, bool kWeighted, bool kForPeer, typename Source>
__device__ void SumItems(PartRing<kType, kExact> ring, Source source) {
  const int pieces = (ring.row_bytes + kPieceBytes - 1) / kPieceBytes;
  Item item;
  if (!source.Fetch(&item) || !source.Await(item)) return;
  Cursor at{0, 0};
  while (true) {
    Item next;
    Cursor next_at{0, 0};
    while (!ring.Full() && !at.Done(item, pieces)) {
      ring.Issue(item, at);
      at.Advance(item);
    }
    const bool more = source.Fetch(&next);
    const bool ready = more && source.Ready(next);
    const auto refill = [&]() {
      if (!at.Done(item, pieces)) {
        ring.Issue(item, at);
        at.Advance(item);
      } else if (ready && !next_at.Done(next, pieces)) {
        ring.Issue(next, next_at);
        next_at.Advance(next);
      }
    };
    for (int piece = 0; piece < pieces; ++piece) {
      SumPiece<kType, kExact, kWeighted, kForPeer>(&ring, item, piece, refill);
    }
    source.Finish(item);
    if (!more || (!ready && !source.Await(next))) break;
    item = next;
    at = next_at;
  }
  // Loads that were issued must land before the block's shared memory is given away.
  for (; ring.used < ring.issued; ++ring.used) ring.Await();
}

// Sums that peers wait for: all their tokens of this pass, sources in turn.
template <bool kExact, bool kWeighted>
struct PeerSums {
  const Call& call;
  const CombineParams& params;
  SourceCounts counts;
  int32_t skip;
  int32_t count;
  int32_t most;
  int64_t partial_bytes;
  int64_t next;
  int64_t step;

  __device__ PeerSums(const Call& c, const CombineParams& p, const Pass& pass, int warp, int warps)
      : call(c), params(p), counts(c, p.plan, p.sizes.tokens), next(warp), step(warps) {
    const int lane = threadIdx.x % 32;
    const int32_t half = lane < call.ranks ? params.plan.recv_count[lane * 4 + 2] : 0;
    const int32_t first_half = min(max(half, 0), counts.staged);
    skip = pass.half == 2 ? first_half : 0;
    count = pass.half == 1 ? first_half : counts.staged - skip;
    most = __reduce_max_sync(~0u, count);
    partial_bytes = kExact ? int64_t{params.sizes.width} * 4 : params.row_bytes;
  }

  __device__ bool Fetch(Item* item) {
    const int peers = call.ranks - 1;
    for (; peers > 0 && next / peers < most; next += step) {
      const int32_t staged = static_cast<int32_t>(next / peers);
      const int source = (call.me + 1 + static_cast<int>(next % peers)) % call.ranks;
      if (staged >= __shfl_sync(~0u, count, source)) continue;
      next += step;
      const int64_t first = __shfl_sync(~0u, counts.first + skip, source);
      StagedRow entries{};
      entries.ReadBounds(params.plan, first + staged);
      entries.ReadEntries(params.plan, params.sizes);
      entries.CheckEntries(params.sizes);
      const bool real = static_cast<int>(threadIdx.x % 32) < entries.count;
      // A row that no prepare wrote: the item is left empty.
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
      item->out = call.Rows(source, call.me) + staged * partial_bytes;
      return true;
    }
    return false;
  }
  __device__ bool Ready(const Item&) const { return true; }
  __device__ bool Await(const Item&) const { return true; }
  __device__ void Finish(const Item& item) const {
    const int lane = threadIdx.x % 32;
    if (params.d_weights != nullptr && lane < item.count) {
      auto* sent = reinterpret_cast<float*>(call.Entries(item.rank, call.me));
      sent[int64_t{item.staged} * params.sizes.top_k + item.slot] = params.d_weights[item.row];
    }
    __syncwarp();
    if (lane == 0) StoreReleaseSys(call.Ready(item.rank, call.me) + item.staged, call.tag);
  }
};

__device__ inline void ReadWeightGrads(const Call& call, const CombineParams& params, int32_t rank,
                                       int64_t slot, int32_t staged) {
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

// This rank's own tokens, in order.
template <bool kExact, bool kWeighted>
struct TokenSums {
  const Call& call;
  const CombineParams& params;
  int64_t end;
  int64_t partial_bytes;
  int64_t next;
  int64_t step;

  __device__ TokenSums(const Call& c, const CombineParams& p, const Pass& pass, int warp, int warps)
      : call(c), params(p), end(pass.end), next(pass.begin + warp), step(warps) {
    partial_bytes = kExact ? int64_t{params.sizes.width} * 4 : params.row_bytes;
  }

  __device__ bool Fetch(Item* item) {
    if (next >= end) return false;
    const int lane = threadIdx.x % 32;
    item->token = next;
    next += step;
    const int64_t slot = item->token * params.sizes.top_k + lane;
    item->staged = -1;
    item->rank = -1;
    if (lane < call.ranks) {
      item->staged = __ldcg(&StagedTable(call)[item->token * call.ranks + lane]);
    }
    int32_t row = -1;
    if (lane < params.sizes.top_k) {
      item->rank = params.plan.dst_rank[slot];
      if (item->rank >= call.ranks) item->rank = -1;
      if (item->rank == call.me) row = params.plan.dst_row[slot];
      if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(params.sizes.capacity)) row = -1;
    }
    // Parts: lower ranks, own rows, higher ranks.
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
    item->part = mine ? static_cast<const uint8_t*>(params.rows) +
                            int64_t{max(own_row, 0)} * params.row_bytes
                      : call.Rows(call.me, from) + max(staged, 0) * partial_bytes;
    item->weight = kWeighted && mine ? params.weights[own_row] : 1.0f;
    item->out = static_cast<uint8_t*>(params.tokens) + item->token * params.row_bytes;
    return true;
  }
  __device__ bool Wanted(const Item& item) const {
    return item.staged >= 0 && static_cast<int>(threadIdx.x % 32) != call.me;
  }
  __device__ const uint32_t* Flag(const Item& item) const {
    return call.Ready(call.me, threadIdx.x % 32) + item.staged;
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
  // Partial sums are stored by peers' threads and loaded by the copy engine here, by other lanes
  // than the ones that saw the flags.
  __device__ bool Arrived(bool here) const {
    const bool all = __all_sync(~0u, here);
    __syncwarp();
    FenceProxyAsync();
    return all;
  }
  __device__ void Finish(const Item& item) const {
    if (params.d_weights == nullptr) return;
    const int64_t slot = item.token * params.sizes.top_k + threadIdx.x % 32;
    ReadWeightGrads(call, params, item.rank, slot, item.staged);
  }
};

template <RowType kType, bool kExact, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params, Pass pass, uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ StagedIndexShared index;
  __shared__ LoadBarrier barriers[kWarps * kMaxSlots];
  const Call call = BeginCall(params.group, params.name, params.op);
  const int warp_in_block = threadIdx.x / 32;
  const int sum_blocks = params.grid.sum_blocks;
  const int reduce_blocks = params.grid.reduce_blocks;
  PartRing<kType, kExact> ring{dynamic + warp_in_block * kRingBytes,
                               barriers + warp_in_block * kMaxSlots, params.row_bytes, 0, 0};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < ring.kSlots; ++i) ring.barriers[i].Init();
    FenceBarrierInit();
  }
  __syncwarp();
  if (!call.dead) {
    if (static_cast<int>(blockIdx.x) < sum_blocks) {
      if (IndexTokens(call, &index, params.plan.dst_rank, params.sizes.top_k, pass.begin, pass.end,
                      blockIdx.x, sum_blocks)) {
        const TokenSums<kExact, kWeighted> tokens(
            call, params, pass, warp_in_block * sum_blocks + blockIdx.x, sum_blocks * kWarps);
        SumItems<kType, kExact, kWeighted, false>(ring, tokens);
      }
    } else {
      const int block = blockIdx.x - sum_blocks;
      const PeerSums<kExact, kWeighted> peers(
          call, params, pass, warp_in_block * reduce_blocks + block, reduce_blocks * kWarps);
      SumItems<kType, kExact, kWeighted, true>(ring, peers);
    }
  }
  // All tokens, also after the second half failed: the first half's must not survive it.
  const Output outputs[] = {
      {params.tokens, int64_t{params.sizes.tokens} * params.row_bytes, nan},
      {params.d_topk_weights,
       params.d_topk_weights != nullptr ? int64_t{params.sizes.tokens} * params.sizes.top_k * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

template <RowType kType, bool kExact>
cudaError_t LaunchPass(cudaStream_t stream, const CombineParams& params, const Pass& pass) {
  const int blocks = params.grid.reduce_blocks + params.grid.sum_blocks;
  const uint32_t nan = NanPattern(params.type);
  const auto kernel = params.weights != nullptr ? CombineKernel<kType, kExact, true>
                                                : CombineKernel<kType, kExact, false>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWarps * kRingBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, kWarps * kRingBytes, stream>>>(params, pass, nan);
  return cudaGetLastError();
}

template <RowType kType>
cudaError_t LaunchPasses(cudaStream_t stream, const CombineParams& params) {
  const int32_t tokens = params.sizes.tokens;
  if (!params.exact || kType == RowType::kF32) {
    return LaunchPass<kType, false>(stream, params, {0, tokens, 0});
  }
  // From static sizes alone, so that every rank makes the same number of passes.
  if (int64_t{tokens} * params.sizes.width * 4 <= params.source_rows_bytes) {
    return LaunchPass<kType, true>(stream, params, {0, tokens, 0});
  }
  const int32_t half = (tokens + 1) / 2;
  const cudaError_t error = LaunchPass<kType, true>(stream, params, {0, half, 1});
  if (error != cudaSuccess) return error;
  return LaunchPass<kType, true>(stream, params, {half, tokens, 2});
}

}  // namespace

cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || params.row_bytes <= 0 ||
      params.row_bytes % 16 != 0 || params.grid.reduce_blocks < 1 || params.grid.sum_blocks < 1 ||
      params.grid.sum_blocks > kMaxBlocks ||
      (params.d_weights == nullptr) != (params.d_topk_weights == nullptr)) {
    return cudaErrorInvalidValue;
  }
  switch (params.type) {
    case RowType::kF32:
      return LaunchPasses<RowType::kF32>(stream, params);
    case RowType::kBF16:
      return LaunchPasses<RowType::kBF16>(stream, params);
    case RowType::kF16:
      return LaunchPasses<RowType::kF16>(stream, params);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace ep_runtime
