// The sending half of dispatch and of combine's backward.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PUSH_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PUSH_ROWS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/block_words.cuh"
#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/call/staged_places.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

constexpr int kPieceBytes = 8192;  // most bytes of a row in one buffer
constexpr int kBuffers = 2;        // buffers of a warp
constexpr int kMaxSenders = 14;    // sending warps of a block

// The landed tokens of each sending warp of a block. Before a flag there must be a fence of system
// scope, which waits for all stores of the multiprocessor. So sending warps execute no fence: they
// count tokens, and the publishing warp executes one fence, then stores the flags of all landed
// tokens.
//
// All accesses are atomic operations, also reads, so that compute-sanitizer reports no races.
struct LandedTokens {
  static constexpr uint32_t kPlaces = 8;  // most tokens of a warp in flight or unpublished

  int32_t staged[kMaxSenders][kPlaces][kMaxRanks];  // place on each rank; -1: not sent to that rank
  uint32_t landed[kMaxSenders];
  uint32_t published[kMaxSenders];

  // Every thread calls this, and syncs with its block before it uses other members.
  __device__ void Clear() {
    if (threadIdx.x < kMaxSenders) landed[threadIdx.x] = published[threadIdx.x] = 0;
  }
  // A sending warp notes the destination of its token `number`; lane r has the place on rank r.
  // Waits until the publishing warp has published the token noted kPlaces earlier.
  __device__ void Note(int sender, uint32_t number, int32_t place) {
    while (number - LoadAcquireBlock(&published[sender]) >= kPlaces) __nanosleep(50);
    atomicExch(&staged[sender][number % kPlaces][threadIdx.x % 32], place);
  }
  // One thread of a sending warp counts one more token, which the warp stored before its last sync.
  __device__ void Add(int sender) { AddReleaseBlock(&landed[sender], 1); }
};

// The buffers of one warp.
struct Ring {
  uint8_t* data;
  LoadBarrier* barriers;
  uint32_t piece_bytes;

  __device__ uint8_t* Buffer(int slot) const { return data + slot * piece_bytes; }
};

// Returns one warp's share of the block's dynamic shared memory, and initialises the warp's
// barriers.
__device__ inline Ring MakeRing(uint8_t* dynamic, LoadBarrier* barriers, uint32_t piece_bytes) {
  const int warp = threadIdx.x / 32;
  Ring ring{dynamic + static_cast<size_t>(warp) * kBuffers * piece_bytes,
            barriers + warp * kBuffers, piece_bytes};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kBuffers; ++i) ring.barriers[i].Init();
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

// The tokens that a warp sends: warp `index` of `count` takes tokens index, index + count, ...
struct WarpShare {
  int index;
  int count;
  __device__ int Token(int i) const { return index + i * count; }
  __device__ int Tokens(int tokens) const {
    return tokens > index ? (tokens - index + count - 1) / count : 0;
  }
};

// One token in the lanes of a warp: lane r has its staged row on rank r, lane k its slot k.
struct TokenSlots {
  int32_t staged;  // -1: no staged row, or one of another part
  uint8_t* to;
  int32_t rank;
  int32_t row;
  float weight;
};

__device__ inline TokenSlots ReadSlots(const DeviceCall& call, const PushJob& job,
                                       const StagedPlaces& places, TokenCounter* counter,
                                       int token) {
  const int lane = threadIdx.x % 32;
  TokenSlots slots{-1, nullptr, -1, -1, 1.0f};
  if (lane < job.top_k) {
    const int64_t slot = int64_t{token} * job.top_k + lane;
    slots.rank = job.dst_rank[slot];
    slots.row = job.dst_row[slot];
    if (job.weights != nullptr) slots.weight = job.weights[slot];
  }
  slots.staged = counter->Number(job.dst_rank, job.top_k, call.ranks, job.tokens, token);
  const int32_t number = slots.staged - places.begin;
  if (number < 0 || number >= places.count) slots.staged = -1;
  slots.to = places.first + int64_t{max(number, 0)} * job.row_bytes;
  if (slots.rank >= call.ranks || static_cast<uint32_t>(slots.row) >= job.capacity) {
    slots.rank = -1;
  }
  return slots;
}

// Sends the weights of a token's rows to the entries of its staged row, indexed by slot.
__device__ inline void SendWeights(const DeviceCall& call, const PushJob& job,
                                   const TokenSlots& slots) {
  const int lane = threadIdx.x % 32;
  const int32_t staged = __shfl_sync(~0u, slots.staged, slots.rank & 31);
  if (slots.rank < 0 || slots.rank == call.me || staged < 0) return;
  auto* entries = reinterpret_cast<float*>(call.Entries(slots.rank, call.me));
  entries[int64_t{staged} * job.top_k + lane] = slots.weight;
}

// The publishing warp of a sending block reports to peers which staged rows are in their windows.
// The block's j-th token belongs to warp j % senders. Tokens are published in order.
__device__ inline void PublishTokens(const DeviceCall& call, const PushJob& job,
                                     LandedTokens* landed, int block, int blocks, int senders) {
  const int lane = threadIdx.x % 32;
  const int tokens = WarpShare{block, blocks}.Tokens(job.tokens);
  uint32_t told = 0;  // lane i: published tokens of warp i
  for (int j = 0; j < tokens;) {
    int end = tokens;
    if (lane < senders) {
      end = min(end, static_cast<int>(LoadAcquireBlock(&landed->landed[lane])) * senders + lane);
    }
    end = __reduce_min_sync(~0u, end);
    if (end <= j) {
      __nanosleep(100);
      continue;
    }
    __syncwarp();
    FenceSys();
    // Each lane stores one flag in an iteration.
    for (int i = j * call.ranks + lane; i < end * call.ranks; i += 32) {
      const int token = i / call.ranks, rank = i - token * call.ranks;
      const int sender = token % senders;
      const uint32_t place = token / senders % LandedTokens::kPlaces;
      const int32_t staged = atomicOr(&landed->staged[sender][place][rank], 0);
      if (staged >= 0) StoreRelaxedSys(call.Ready(rank, call.me) + staged, call.tag);
    }
    __syncwarp();
    j = end;
    const uint32_t done = lane < senders && j > lane ? (j - lane + senders - 1) / senders : 0;
    if (done != told) AddReleaseBlock(&landed->published[lane], done - told);
    told = done;
  }
}

// Counts one more token of the warp, once the token's copies have landed.
__device__ inline void CountLanded(LandedTokens* landed) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  FenceProxyAsync();
  landed->Add(threadIdx.x / 32);
}

// Sends the tokens of one warp. All warps together send tokens in order, so rows arrive in order.
// Returns how many pieces went through the ring.
__device__ int PushRows(const DeviceCall& call, const PushJob& job, const StagedPlaces& places,
                        const TokenTable& table, const Ring& ring, const WarpShare& share,
                        LandedTokens* landed) {
  const int lane = threadIdx.x % 32;
  const int count = share.Tokens(job.tokens);
  const int total = count * job.pieces;
  const auto load = [&](int q) {
    const int64_t token = share.Token(q / job.pieces);
    const uint32_t offset = (q % job.pieces) * ring.piece_bytes;
    const uint32_t bytes = min(ring.piece_bytes, job.row_bytes - offset);
    const int slot = q % kBuffers;
    ring.barriers[slot].Load(ring.Buffer(slot), job.rows + token * job.row_bytes + offset, bytes);
  };
  if (lane == 0 && total > 0) load(0);
  TokenCounter counter(table.before, call.ranks, job.tokens);
  TokenSlots slots{-1, nullptr, -1, -1, 1.0f};
  if (count > 0) slots = ReadSlots(call, job, places, &counter, share.Token(0));
  for (int i = 0; i < count; ++i) {
    const uint32_t peers = __ballot_sync(~0u, slots.staged >= 0);
    if (job.weights != nullptr) SendWeights(call, job, slots);
    landed->Note(threadIdx.x / 32, i, slots.staged);
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
      // Start with the next rank, so that ranks begin with different peers.
      for (int step = 1; step < call.ranks; ++step) {
        const int dest = call.me + step < call.ranks ? call.me + step : call.me + step - call.ranks;
        uint8_t* to = PointerOf(dest, slots.to);
        if (lane == 0 && (peers >> dest & 1) != 0) BulkStore(to + offset, buffer, bytes);
      }
      if (lane == 0) CommitStores();
    }
    if (i + 1 < count) slots = ReadSlots(call, job, places, &counter, share.Token(i + 1));
    if (lane == 0) WaitStores<1>();
    if (i > 0) CountLanded(landed);
  }
  if (lane == 0) WaitStores<0>();
  if (count > 0) CountLanded(landed);
  return total;
}

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PUSH_ROWS_CUH_
