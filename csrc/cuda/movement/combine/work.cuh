// Assigns the sums of a launch to warps.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/staged_index.cuh"
#include "cuda/movement/call/staged_places.cuh"
#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/combine/part_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kSenders =
    kWarps - 1;  // sending warps of a reducing block, whose last warp publishes

// The tokens of one launch: all, or one half.
struct Pass {
  int32_t begin;
  int32_t end;
  int32_t half;  // 0: all, 1: first, 2: second
  bool packed;   // LaneRoom::Packs
};

// Ranks of the slots of the pass's first token.
__device__ inline const int32_t* DstRankOf(const CombineParams& params, const Pass& pass) {
  return params.plan.dst_rank + int64_t{pass.begin} * params.sizes.top_k;
}

template <CombinePrecision kPrecision>
__device__ int32_t PartialBytes(const CombineParams& params) {
  if (kPrecision == CombinePrecision::kExact) return params.sizes.width * 4;
  if (kPrecision == CombinePrecision::kFast) return params.row_bytes;
  return Fp8Bytes(params.sizes.width, kPieceBytes / (params.row_bytes / params.sizes.width));
}

// Returns the number of slices of a row: warps share a row's pieces if there are fewer tokens than
// warps. Each slice of a staged row has its own flag, word staged * slices + slice. The result is
// the same on all ranks.
__device__ inline int32_t SlicesOf(const DeviceCall& call, const CombineParams& params,
                                   const Pass& pass) {
  constexpr int64_t kSlices = 1024;  // limit of slices in a pass
  const int32_t pieces = (params.row_bytes + kPieceBytes - 1) / kPieceBytes;
  const auto each = min(kSlices, call.group->max_tokens) / max(pass.end - pass.begin, 1);
  return max(min(pieces, static_cast<int32_t>(each)), 1);
}

// Where partial sums of a pass are stored; lane r of a warp has the place of rank r's sums. `rank`
// sends its sums of `owner`'s tokens to the owner's lane. If packed, they follow the sums of lower
// ranks.
struct SumPlaces {
  uint8_t* first = nullptr;
  int32_t room = 0;  // number of sums that fit; all sums of a plan from prepare do

  __device__ SumPlaces(const DeviceCall& call, const CombineParams& params, const Pass& pass,
                       int owner, int rank, int32_t partial_bytes) {
    if (owner >= call.ranks || rank >= call.ranks || owner == rank) return;
    if (!pass.packed) {
      room = pass.end - pass.begin;
      first = RoomApart(call, owner, rank, room, partial_bytes);
      return;
    }
    const PairCounts counts{params.plan.recv_count, call.ranks, params.sizes.tokens};
    int64_t before = 0;
    for (int r = 0; r < rank; ++r) {
      if (r == owner) continue;
      const int32_t half = pass.half == 0 ? 0 : counts.FirstHalf(owner, r);
      before += pass.half == 1 ? half : counts.All(owner, r) - half;
    }
    first = call.Lane(owner) + before * partial_bytes;
    room = static_cast<int32_t>(max(params.room.bytes / partial_bytes - before, int64_t{0}));
  }
};

constexpr int kTableBarrier = 1;  // only one block arrives at this barrier

// The first block counts how many tokens each rank keeps before each window of tokens, for
// TokenCounter.
__device__ inline void TellTable(const DeviceCall& call, const CombineParams& params,
                                 const Pass& pass, TokenTable* table) {
  const int tokens = pass.end - pass.begin;
  table->Count(DstRankOf(params, pass), params.sizes.top_k, call.ranks, tokens);
  const int words = TokenTable::Windows(call.ranks, tokens) * call.ranks;
  for (int i = threadIdx.x; i < words; i += blockDim.x) {
    ScratchBlockCounts(call)[i] = table->before[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) AddReleaseGpu(&call.group->arrived[kTableBarrier], 1);
}

// Numbers of one kind of work. Each of the first `warps` numbers belongs to one warp, every later
// number to the warp that draws it. A warp must do the work it drew.
struct WorkNumbers {
  int which;  // the counter that numbers are drawn from
  uint32_t warps;
  uint32_t number;  // valid in lane 0

  __device__ void Draw(const DeviceCall& call) {
    if (threadIdx.x % 32 == 0) number = warps + TakeTicketAlone(call, which);
  }
  __device__ uint32_t Get() const { return __shfl_sync(~0u, number, 0); }
};

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_
