#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/call/staged_rows.cuh"
#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/combine/landed_sums.cuh"
#include "cuda/movement/combine/part_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kSenders = kWarps - 1;       // of a block that reduces; its last warp publishes
constexpr int kPeerTicket = kEmptyTicket;  // combine has no empty rows
constexpr int kSharedBytes = kWarps * kRingBytes + sizeof(StagedIndexShared);

// The tokens of one launch: all, or one half.
struct Pass {
  int32_t begin;
  int32_t end;
  int32_t half;  // 0: all, 1: first, 2: second
};

// Numbers of one kind of work: the first `warps` belong to a warp each, every later one to the warp
// that draws next. A warp does what it drew.
struct WorkNumbers {
  int which;  // counter
  uint32_t warps;
  uint32_t number;  // lane 0's

  __device__ void Draw(const DeviceCall& call) {
    if (threadIdx.x % 32 == 0) number = warps + TakeTicketAlone(call, which);
  }
  __device__ uint32_t Get() const { return __shfl_sync(~0u, number, 0); }
};

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
    if constexpr (PartRing<kType, kExact>::kWide > 1) {
      if (ring->wide_out) {
        constexpr int kWide = PartRing<kType, kExact>::kWide;
        StoreSums<kType, true>(sums, item.out + int64_t{piece} * kPieceBytes * kWide, vectors);
        return;
      }
    }
    StoreSums<kType, false>(sums, item.out + int64_t{piece} * kPieceBytes, vectors);
  }
}

// Runs a warp's items. `source` has: bool Fetch(Item*) for the item that was drawn last, Draw() for
// the next one, bool Ready(item) that does not wait, bool Await(item) that does, and Finish(item)
// after its sums are stored.
template <RowType kType, bool kExact, bool kWeighted, bool kForPeer, typename Source>
__device__ void SumItems(PartRing<kType, kExact>& ring, Source& source) {
  const int pieces = (ring.row_bytes + kPieceBytes - 1) / kPieceBytes;
  Item item;
  if (!source.Fetch(&item) || !source.Await(item)) return;
  source.Draw();
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
      // Late enough that a slow warp holds no more than it sums and loads.
      if (more && piece + 1 == pieces) source.Draw();
      SumPiece<kType, kExact, kWeighted, kForPeer>(&ring, item, piece, refill);
    }
    source.Finish(item);
    if (!more || (!ready && !source.Await(next))) break;
    item = next;
    at = next_at;
  }
  // Loads that were issued must land before the ring is used again, or given away.
  for (; ring.used < ring.issued; ++ring.used) ring.Await();
}

// Sums that peers wait for: all their tokens of this pass, sources in turn.
template <bool kExact, bool kWeighted>
struct PeerSums {
  const DeviceCall& call;
  const CombineParams& params;
  SourceCounts counts;
  LandedSums<kSenders>* landed;
  WorkNumbers numbers;
  int32_t skip;
  int32_t count;
  int32_t most;
  int32_t partial_bytes;

  // Warp number `warp` of the `warps` that start with this work.
  __device__ PeerSums(const DeviceCall& c, const CombineParams& p, const Pass& pass,
                      LandedSums<kSenders>* l, uint32_t warp, uint32_t warps)
      : call(c),
        params(p),
        counts(c, p.plan, p.sizes.tokens),
        landed(l),
        numbers{kPeerTicket, warps, warp} {
    const int lane = threadIdx.x % 32;
    const int32_t half = lane < call.ranks ? params.plan.recv_count[lane * 4 + 2] : 0;
    const int32_t first_half = min(max(half, 0), counts.staged);
    skip = pass.half == 2 ? first_half : 0;
    count = pass.half == 1 ? first_half : counts.staged - skip;
    most = __reduce_max_sync(~0u, lane == call.me ? 0 : count);
    partial_bytes = kExact ? params.sizes.width * 4 : params.row_bytes;
  }

  __device__ void Draw() { numbers.Draw(call); }
  __device__ bool Fetch(Item* item) {
    const uint32_t peers = call.ranks - 1;
    for (; peers > 0; Draw()) {
      const uint32_t number = numbers.Get();
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
      item->out = call.Rows(source, call.me) + int64_t{staged} * partial_bytes;
      return true;
    }
    return false;
  }
  __device__ bool Ready(const Item&) const { return true; }
  __device__ bool Await(const Item&) const { return true; }
  __device__ void Finish(const Item& item) {
    const int lane = threadIdx.x % 32;
    if (params.d_weights != nullptr && lane < item.count) {
      auto* sent = reinterpret_cast<float*>(call.Entries(item.rank, call.me));
      sent[int64_t{item.staged} * params.sizes.top_k + item.slot] = params.d_weights[item.row];
    }
    __syncwarp();
    if (lane == 0) landed->Land(threadIdx.x / 32, {item.rank, item.staged});
  }
};

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

template <bool kExact>
__device__ int32_t TokenBytes(const CombineParams& params) {
  return kExact && params.wide_tokens ? params.sizes.width * 4 : params.row_bytes;
}

// This rank's own tokens, in order.
template <bool kExact, bool kWeighted>
struct TokenSums {
  const DeviceCall& call;
  const CombineParams& params;
  const Pass& pass;
  WorkNumbers numbers;
  int32_t partial_bytes;
  int32_t token_bytes;

  __device__ TokenSums(const DeviceCall& c, const CombineParams& p, const Pass& tokens,
                       const WorkNumbers& first)
      : call(c), params(p), pass(tokens), numbers(first) {
    partial_bytes = kExact ? params.sizes.width * 4 : params.row_bytes;
    token_bytes = TokenBytes<kExact>(params);
  }

  __device__ void Draw() { numbers.Draw(call); }
  __device__ bool Fetch(Item* item) {
    const uint32_t number = numbers.Get();
    if (number >= static_cast<uint32_t>(pass.end - pass.begin)) return false;
    const int lane = threadIdx.x % 32;
    item->token = pass.begin + static_cast<int32_t>(number);
    const int64_t slot = int64_t{item->token} * params.sizes.top_k + lane;
    item->staged = -1;
    item->rank = -1;
    if (lane < call.ranks) {
      item->staged = __ldcg(&StagedTable(call)[int64_t{item->token} * call.ranks + lane]);
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
                      : call.Rows(call.me, from) + int64_t{max(staged, 0)} * partial_bytes;
    item->weight = kWeighted && mine ? params.weights[own_row] : 1.0f;
    item->out = static_cast<uint8_t*>(params.tokens) + int64_t{item->token} * token_bytes;
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
    const int64_t slot = int64_t{item.token} * params.sizes.top_k + threadIdx.x % 32;
    ReadWeightGrads(call, params, item.rank, slot, item.staged);
  }
};

template <RowType kType, bool kExact, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params, Pass pass, uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ LoadBarrier barriers[kWarps * kMaxSlots];
  __shared__ LandedSums<kSenders> landed;
  landed.Clear();
  const DeviceCall call = BeginCall(params.group, params.name, params.op);
  const uint32_t warp = threadIdx.x / 32;
  const int sum_blocks = params.grid.sum_blocks;
  const int reduce_blocks = params.grid.reduce_blocks;
  auto ring =
      MakeRing<kType, kExact>(dynamic, barriers, params.row_bytes, kExact && params.wide_tokens);
  if (!call.dead) {
    WorkNumbers numbers{kItemTicket, static_cast<uint32_t>(sum_blocks * kWarps), 0};
    bool alive;
    if (static_cast<int>(blockIdx.x) < sum_blocks) {
      auto* index = reinterpret_cast<StagedIndexShared*>(dynamic + kWarps * kRingBytes);
      alive = IndexTokens(call, index, params.plan.dst_rank, params.sizes.top_k, pass.begin,
                          pass.end, blockIdx.x, sum_blocks);
      numbers.number = warp * sum_blocks + blockIdx.x;
    } else {
      if (warp < kSenders) {
        PeerSums<kExact, kWeighted> peers(call, params, pass, &landed,
                                          warp * reduce_blocks + blockIdx.x - sum_blocks,
                                          reduce_blocks * kSenders);
        SumItems<kType, kExact, kWeighted, true>(ring, peers);
        if (threadIdx.x % 32 == 0) landed.End();
      } else {
        landed.Publish(call);
      }
      // Nothing more to send. What is left to sum waits for peers that send, never for sums.
      alive = threadIdx.x % 32 != 0 || AwaitBlocks(call, kTableBarrier, sum_blocks);
      alive = __all_sync(~0u, alive);
      if (alive) numbers.Draw(call);
    }
    if (alive) {
      TokenSums<kExact, kWeighted> tokens(call, params, pass, numbers);
      SumItems<kType, kExact, kWeighted, false>(ring, tokens);
    }
  }
  // All tokens, also after the second half failed: the first half's must not survive it.
  const Output outputs[] = {
      {params.tokens, int64_t{params.sizes.tokens} * TokenBytes<kExact>(params), nan},
      {params.d_topk_weights,
       params.d_topk_weights != nullptr ? int64_t{params.sizes.tokens} * params.sizes.top_k * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

template <RowType kType, bool kExact>
cudaError_t LaunchPass(cudaStream_t stream, const CombineParams& params, const Pass& pass) {
  const int blocks = params.grid.reduce_blocks + params.grid.sum_blocks;
  const uint32_t nan = NanPattern(params.wide_tokens ? RowType::kF32 : params.type);
  const auto kernel = params.weights != nullptr ? CombineKernel<kType, kExact, true>
                                                : CombineKernel<kType, kExact, false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(params, pass, nan);
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
      (params.wide_tokens && (!params.exact || params.type == RowType::kF32)) ||
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
