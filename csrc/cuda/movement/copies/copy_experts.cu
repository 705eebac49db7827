// Copies experts between ranks, in chunks through the lanes.
//
//   who            does                                              waits for
//   push block     a chunk of an expert -> Rows(dest, me), then      its own copies
//                  Ready(dest, me)[chunk]
//   place block    Rows(me, source) -> the slot; or adds them to     Ready(me, source)[chunk]
//                  the gradient at home; the first one TellCall
//
// All ranks have the same list of slots. One rank sends another a stream of chunks: the experts
// that the two exchange, in order of slots, each in the same number of chunks. A source's part of a
// lane has room for some chunks; one round, a call with its own epoch, moves so many chunks of
// every stream. The kernel makes as many rounds as the longest stream needs, none if there are no
// copies.
//
// Memory order: threads of a block store a chunk and sync; one of them then makes the stores
// visible to the system and stores the flag with release. A placing block acquires the flag, syncs,
// and reads the chunk from L2, because the L1 cache may hold bytes of an earlier call. Waits cannot
// deadlock, as in dispatch: sending waits for nobody. call.cuh explains the begin and end of a
// call.

#include <algorithm>

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/row_math.cuh"
#include "cuda/movement/copies/copy_experts.h"

namespace ep_runtime {
namespace cuda {
namespace copies {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;  // of an SM: one sends, one receives
constexpr int kUnroll = 8;  // 16-byte words of a thread in a chunk
constexpr int64_t kChunkBytes = int64_t{kThreads} * kUnroll * 16;

// How streams are cut into chunks and rounds.
struct Cut {
  int32_t part_chunks;   // chunks of one source's part of a lane
  int32_t block_chunks;  // chunks of an expert
};

Cut CutOf(const LaneRoom& room, int64_t max_tokens, int64_t block_bytes) {
  const int64_t part = room.bytes / std::max(room.ranks - 1, 1);
  // A chunk has one flag, and a source has as many flags as a rank has tokens.
  const int64_t chunks = std::min(part / kChunkBytes, max_tokens);
  return {static_cast<int32_t>(chunks),
          static_cast<int32_t>((block_bytes + kChunkBytes - 1) / kChunkBytes)};
}

// Slots whose experts this rank exchanges with each other rank, in order.
struct Streams {
  int32_t count[kMaxRanks];
  int16_t slot[kMaxRanks][kMaxSpare];

  // Stores for `rank` the slots of rank `holder` that have an expert of rank `owner`. One thread
  // calls this.
  __device__ void Fill(int rank, const CopyExpertsParams& params, int holder, int owner) {
    const int32_t first = owner * params.local;
    int32_t found = 0;
    for (int32_t s = 0; s < params.spare; ++s) {
      const int32_t expert = params.experts[holder * params.spare + s];
      if (expert >= first && expert < first + params.local) {
        slot[rank][found++] = static_cast<int16_t>(s);
      }
    }
    count[rank] = holder == owner ? 0 : found;
  }
};

struct Shared {
  Streams streams;
  const uint8_t* pieces[kMaxRanks];  // in lanes: what each rank adds to a chunk, or null
  int32_t longest;                   // slots with experts on the rank that has most
};

__device__ __forceinline__ void CopyChunk(uint8_t* to, const uint8_t* from, int32_t bytes) {
  const int32_t words = bytes / 16;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* dest = reinterpret_cast<uint4*>(to);
  uint4 held[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int32_t word = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (word < words) held[i] = __ldcg(source + word);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int32_t word = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (word < words) dest[word] = held[i];
  }
}

// A chunk of a round: peer rank, index in the peer's part, slot, and bytes of its expert.
struct Chunk {
  int rank;
  int32_t place;
  int32_t slot;
  int64_t offset;
  int32_t bytes;
};

// Adds pieces to a chunk of gradients, in rank order.
template <RowType kType>
__device__ __forceinline__ void AddChunks(uint8_t* to, const uint8_t* const (&pieces)[kMaxRanks],
                                          int ranks, int32_t bytes) {
  using E = Element<kType>;
  auto* sums = reinterpret_cast<uint4*>(to);
#pragma unroll 2
  for (int32_t word = static_cast<int32_t>(threadIdx.x); word < bytes / 16; word += kThreads) {
    float sum[E::kPerVector], more[E::kPerVector];
    E::Unpack(sums[word], sum);
    for (int rank = 0; rank < ranks; ++rank) {
      if (pieces[rank] == nullptr) continue;
      E::Unpack(__ldcg(reinterpret_cast<const uint4*>(pieces[rank]) + word), more);
#pragma unroll
      for (int i = 0; i < E::kPerVector; ++i) sum[i] += more[i];
    }
    sums[word] = E::Pack(sum);
  }
}

// Calls `move` with each chunk of this block, until it returns false.
template <typename Move>
__device__ void EachChunk(const DeviceCall& call, const CopyExpertsParams& params, const Cut& cut,
                          int round, const Streams& streams, int block, int blocks,
                          const Move& move) {
  const int others = call.ranks - 1;
  int32_t most = 0;
  for (int rank = 0; rank < call.ranks; ++rank) most = max(most, streams.count[rank]);
  const int32_t first = round * cut.part_chunks;
  const int32_t end = min(most * cut.block_chunks - first, cut.part_chunks);
  for (int item = block; item < end * others; item += blocks) {
    const int rank = (call.me + 1 + item % others) % call.ranks;
    const int32_t place = item / others;
    const int32_t number = first + place, index = number / cut.block_chunks;
    if (index >= streams.count[rank]) continue;
    const int64_t offset = int64_t{number % cut.block_chunks} * kChunkBytes;
    const int64_t left = params.block_bytes - offset;
    const Chunk chunk{rank, place, streams.slot[rank][index], offset,
                      static_cast<int32_t>(left < kChunkBytes ? left : kChunkBytes)};
    if (!move(chunk)) return;
  }
}

// Returns where `source` puts a chunk in `dest`'s lane.
__device__ uint8_t* PlaceIn(const DeviceCall& call, const Cut& cut, int dest, int source,
                            int32_t place) {
  const int part = source < dest ? source : source - 1;
  return call.Lane(dest) + (int64_t{part} * cut.part_chunks + place) * kChunkBytes;
}

__device__ void Push(const DeviceCall& call, const CopyExpertsParams& params, const Cut& cut,
                     int round, const Streams& streams) {
  const auto* from = static_cast<const uint8_t*>(params.from);
  EachChunk(call, params, cut, round, streams, blockIdx.x, params.sms, [&](const Chunk& chunk) {
    const int64_t block = params.home ? chunk.slot
                                      : params.experts[chunk.rank * params.spare + chunk.slot] -
                                            call.me * params.local;
    CopyChunk(PlaceIn(call, cut, chunk.rank, call.me, chunk.place),
              from + block * params.block_bytes + chunk.offset, chunk.bytes);
    __syncthreads();
    if (threadIdx.x == 0) {
      FenceSys();
      StoreReleaseSys(call.Ready(chunk.rank, call.me) + chunk.place, call.tag);
    }
    return true;
  });
}

// Finds what this round adds to a chunk of this rank's gradients, one thread for each rank, and
// waits for it. Returns false in every thread if the chunk is another block's, which has the piece
// of an earlier rank, or if the call failed; then `alive` is false.
__device__ bool FindPieces(const DeviceCall& call, const CopyExpertsParams& params, const Cut& cut,
                           int round, const Chunk& chunk, Shared* shared, bool* alive) {
  const int rank = static_cast<int>(threadIdx.x);
  const uint32_t* ready = nullptr;
  if (rank < call.ranks) {
    const Streams& streams = shared->streams;
    const int32_t expert = params.experts[chunk.rank * params.spare + chunk.slot];
    int32_t index = 0;
    while (index < streams.count[rank] &&
           params.experts[rank * params.spare + streams.slot[rank][index]] != expert) {
      ++index;
    }
    const int32_t place = index * cut.block_chunks +
                          static_cast<int32_t>(chunk.offset / kChunkBytes) -
                          round * cut.part_chunks;
    const bool found = index < streams.count[rank] && place >= 0 && place < cut.part_chunks;
    if (found) ready = call.Ready(call.me, rank) + place;
    shared->pieces[rank] = found ? PlaceIn(call, cut, call.me, rank, place) : nullptr;
  }
  if (__syncthreads_or(ready != nullptr && rank < chunk.rank)) return false;
  *alive = __syncthreads_and(ready == nullptr || AwaitWord(call, ready, call.tag, rank));
  return *alive;
}

// Adds copies' gradients to those at home.
template <RowType kType>
__device__ void Add(const DeviceCall& call, const CopyExpertsParams& params, const Cut& cut,
                    int round, Shared* shared) {
  auto* to = static_cast<uint8_t*>(params.to);
  const int block = static_cast<int>(blockIdx.x) - params.sms;
  EachChunk(call, params, cut, round, shared->streams, block, params.sms, [&](const Chunk& chunk) {
    bool alive = true;
    if (FindPieces(call, params, cut, round, chunk, shared, &alive)) {
      const int64_t expert =
          params.experts[chunk.rank * params.spare + chunk.slot] - call.me * params.local;
      AddChunks<kType>(to + expert * params.block_bytes + chunk.offset, shared->pieces, call.ranks,
                       chunk.bytes);
    }
    __syncthreads();
    return alive;
  });
}

__device__ void Place(const DeviceCall& call, const CopyExpertsParams& params, const Cut& cut,
                      int round, const Streams& streams) {
  auto* to = static_cast<uint8_t*>(params.to);
  const int block = static_cast<int>(blockIdx.x) - params.sms;
  EachChunk(call, params, cut, round, streams, block, params.sms, [&](const Chunk& chunk) {
    bool alive = true;
    if (threadIdx.x == 0) {
      const uint32_t* ready = call.Ready(call.me, chunk.rank) + chunk.place;
      alive = AwaitWord(call, ready, call.tag, chunk.rank);
    }
    if (!__syncthreads_and(alive)) return false;
    CopyChunk(to + chunk.slot * params.block_bytes + chunk.offset,
              PlaceIn(call, cut, call.me, chunk.rank, chunk.place), chunk.bytes);
    return true;
  });
}

// kType: of gradients that go home; kBytes: weights go to slots.
template <RowType kType>
__global__ void __launch_bounds__(kThreads, kBlocks)
    CopyExpertsKernel(const __grid_constant__ CopyExpertsParams params, Cut cut) {
  __shared__ Shared shared;
  const int ranks = params.group->ep_size, me = params.group->ep_rank;
  const int thread = static_cast<int>(threadIdx.x);
  const bool push = static_cast<int>(blockIdx.x) < params.sms;
  if (thread == 0) shared.longest = 0;
  __syncthreads();
  for (int32_t at = thread; at < ranks * params.spare; at += kThreads) {
    if (params.experts[at] >= 0) atomicMax(&shared.longest, at % params.spare + 1);
  }
  __syncthreads();
  const int32_t chunks = shared.longest * cut.block_chunks;
  const int32_t rounds = (chunks + cut.part_chunks - 1) / cut.part_chunks;
  if (rounds == 0) return;
  if (thread < ranks) {
    // Weights go from the expert's owner to the slot's holder, gradients go back.
    const bool theirs = push != params.home;
    shared.streams.Fill(thread, params, theirs ? thread : me, theirs ? me : thread);
  }
  __syncthreads();
  const int64_t blocks = params.home ? params.local : params.spare;
  const Output outputs[] = {{params.to, blocks * params.block_bytes, params.lost}};
  for (int32_t round = 0; round < rounds; ++round) {
    const DeviceCall call = BeginCall(params.group, params.name, OpCode::kCopies);
    if (!call.dead) {
      if (push) {
        Push(call, params, cut, round, shared.streams);
      } else {
        if (static_cast<int>(blockIdx.x) == params.sms && thread < 32) {
          TellCall(call, params.name);
        }
        if constexpr (kType == RowType::kBytes) {
          Place(call, params, cut, round, shared.streams);
        } else {
          Add<kType>(call, params, cut, round, &shared);
        }
      }
    }
    const bool more = round + 1 < rounds;
    EndCall(call, outputs, more);
    if (more) AwaitEnd(call);
  }
}

using Kernel = void (*)(CopyExpertsParams, Cut);

Kernel KernelOf(RowType type) {
  switch (type) {
    case RowType::kF32:
      return CopyExpertsKernel<RowType::kF32>;
    case RowType::kBF16:
      return CopyExpertsKernel<RowType::kBF16>;
    case RowType::kF16:
      return CopyExpertsKernel<RowType::kF16>;
    case RowType::kBytes:
      break;
  }
  return CopyExpertsKernel<RowType::kBytes>;
}

}  // namespace
}  // namespace copies

bool CopiesFit(const LaneRoom& room, int64_t max_tokens) {
  return copies::CutOf(room, max_tokens, 0).part_chunks > 0;
}

cudaError_t LaunchCopyExperts(cudaStream_t stream, CopyExpertsParams params, int64_t max_tokens) {
  const copies::Cut cut = copies::CutOf(params.room, max_tokens, params.block_bytes);
  if (params.spare < 1 || params.spare > kMaxSpare || params.block_bytes < 16 ||
      params.block_bytes % 16 != 0 || cut.part_chunks < 1 || params.room.ranks > kMaxRanks) {
    return cudaErrorInvalidValue;
  }
  const copies::Kernel kernel = copies::KernelOf(params.home ? params.type : RowType::kBytes);
  // An SM holds two blocks.
  const int32_t blocks = params.sms * copies::kBlocks;
  kernel<<<blocks, copies::kThreads, 0, stream>>>(params, cut);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
