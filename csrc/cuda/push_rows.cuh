// The sending half of dispatch and of combine's backward.
#ifndef EP_RUNTIME_CUDA_PUSH_ROWS_CUH_
#define EP_RUNTIME_CUDA_PUSH_ROWS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/call.cuh"
#include "cuda/staged_index.cuh"

namespace ep_runtime {
namespace cuda {

constexpr int kPieceBytes = 16384;  // most that one buffer holds of a row
constexpr int kMaxBuffers = 4;

// The buffers of one warp.
struct Ring {
  uint8_t* data;
  LoadBarrier* barriers;
  uint32_t piece_bytes;

  __device__ uint8_t* Buffer(int slot) const { return data + slot * piece_bytes; }
};

// One warp's part of the block's dynamic shared memory; initialises its barriers.
__device__ inline Ring MakeRing(uint8_t* dynamic, LoadBarrier* barriers, uint32_t piece_bytes,
                                int buffers) {
  const int warp = threadIdx.x / 32;
  Ring ring{dynamic + static_cast<size_t>(warp) * buffers * piece_bytes,
            barriers + warp * kMaxBuffers, piece_bytes};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < buffers; ++i) ring.barriers[i].Init();
    FenceBarrierInit();
  }
  __syncwarp();
  return ring;
}

struct PushJob {
  const uint8_t* rows;   // [T, row_bytes]
  const float* weights;  // [T, K] or null
  const int32_t* dst_rank;
  const int32_t* dst_row;
  int32_t tokens;
  int32_t top_k;
  int32_t capacity;
  int32_t row_bytes;
  int32_t pieces;
};

// What the lanes of a warp know of one token: lane r its staged row on rank r, lane k its slot k.
struct TokenSlots {
  int32_t staged;
  int32_t rank;
  int32_t row;
  float weight;
};

__device__ inline TokenSlots ReadSlots(const Call& call, const PushJob& job, int64_t token) {
  const int lane = threadIdx.x % 32;
  TokenSlots slots{-1, -1, -1, 1.0f};
  if (lane < call.ranks) slots.staged = __ldcg(&StagedTable(call)[token * call.ranks + lane]);
  if (lane < job.top_k) {
    const int64_t slot = token * job.top_k + lane;
    slots.rank = job.dst_rank[slot];
    slots.row = job.dst_row[slot];
    if (slots.rank >= call.ranks || static_cast<uint32_t>(slots.row) >= job.capacity) {
      slots.rank = -1;
    }
    if (job.weights != nullptr) slots.weight = job.weights[slot];
  }
  return slots;
}

// The weights of a token's rows go beside its staged row, indexed by slot.
__device__ inline void SendWeights(const Call& call, const PushJob& job, const TokenSlots& slots) {
  const int lane = threadIdx.x % 32;
  const int32_t staged = __shfl_sync(~0u, slots.staged, slots.rank & 31);
  if (slots.rank < 0 || slots.rank == call.me || staged < 0) return;
  auto* entries = reinterpret_cast<float*>(call.Entries(slots.rank, call.me));
  entries[int64_t{staged} * job.top_k + lane] = slots.weight;
}

// Tells the peers that the staged rows of one token are in their windows.
__device__ inline void PublishRow(const Call& call, int32_t staged) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (staged < 0 || lane == call.me) return;
  FenceProxyAsync();
  StoreReleaseSys(call.Ready(lane, call.me) + staged, call.tag);
}

// Warp `warp` of `warps` sends tokens warp, warp + warps, ...: rows arrive in token order.
// `keep(token, slots, mine, buffer, offset, bytes)` gets every piece of rows that stay here, with
// `mine` a bit per slot.
template <int kBuffers, typename Keep>
__device__ void PushRows(const Call& call, const PushJob& job, const Ring& ring, int warp,
                         int warps, const Keep& keep) {
  const int lane = threadIdx.x % 32;
  const int count = job.tokens > warp ? (job.tokens - warp + warps - 1) / warps : 0;
  const int total = count * job.pieces;
  const auto load = [&](int q) {
    const int64_t token = warp + int64_t{q / job.pieces} * warps;
    const uint32_t offset = (q % job.pieces) * ring.piece_bytes;
    const uint32_t bytes = min(ring.piece_bytes, job.row_bytes - offset);
    const int slot = q % kBuffers;
    ring.barriers[slot].Load(ring.Buffer(slot), job.rows + token * job.row_bytes + offset, bytes);
  };
  if (lane == 0 && total > 0) load(0);
  TokenSlots next = count > 0 ? ReadSlots(call, job, warp) : TokenSlots{-1, -1, -1, 1.0f};
  int32_t sent = -1;
  for (int i = 0; i < count; ++i) {
    const int64_t token = warp + int64_t{i} * warps;
    const TokenSlots slots = next;
    if (i + 1 < count) next = ReadSlots(call, job, token + warps);
    const uint32_t mine = __ballot_sync(~0u, slots.rank == call.me);
    const uint32_t peers = __ballot_sync(~0u, slots.staged >= 0 && lane != call.me);
    if (job.weights != nullptr) SendWeights(call, job, slots);
    for (int piece = 0; piece < job.pieces; ++piece) {
      const int q = i * job.pieces + piece;
      const uint32_t offset = piece * ring.piece_bytes;
      const uint32_t bytes = min(ring.piece_bytes, job.row_bytes - offset);
      uint8_t* buffer = ring.Buffer(q % kBuffers);
      if (lane == 0) {
        if (q + 1 < total) {
          WaitStoresRead<kBuffers - 2>();
          load(q + 1);
        }
        ring.barriers[q % kBuffers].Wait(q / kBuffers & 1);
      }
      // Round the ring from this rank on, so that no peer is everybody's first.
      for (int step = 1; step < call.ranks; ++step) {
        const int dest = call.me + step < call.ranks ? call.me + step : call.me + step - call.ranks;
        const int64_t staged = __shfl_sync(~0u, slots.staged, dest);
        if (lane == 0 && (peers >> dest & 1) != 0) {
          BulkStore(call.Rows(dest, call.me) + staged * job.row_bytes + offset, buffer, bytes);
        }
      }
      if (mine != 0) keep(token, slots, mine, buffer, offset, bytes);
      if (lane == 0) CommitStores();
    }
    if (lane == 0) WaitStores<1>();
    PublishRow(call, sent);
    sent = slots.staged;
  }
  if (lane == 0) WaitStores<0>();
  PublishRow(call, sent);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_PUSH_ROWS_CUH_
