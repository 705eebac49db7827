// Who takes which sums of a launch.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/staged_places.cuh"
#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/combine/part_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kSenders = kWarps - 1;  // of a block that reduces; its last warp publishes

// The tokens of one launch: all, or one half.
struct Pass {
  int32_t begin;
  int32_t end;
  int32_t half;  // 0: all, 1: first, 2: second
  bool packed;   // LaneRoom
};

template <CombinePrecision kPrecision>
__device__ int32_t PartialBytes(const CombineParams& params) {
  if (kPrecision == CombinePrecision::kExact) return params.sizes.width * 4;
  if (kPrecision == CombinePrecision::kFast) return params.row_bytes;
  return Fp8Bytes(params.sizes.width, kPieceBytes / (params.row_bytes / params.sizes.width));
}

// Where partial sums of a pass lie; lane r of a warp holds rank r's. Of tokens of `owner` those
// that `rank` sends, in the owner's lane: behind the ones of lower ranks where they are packed.
struct SumPlaces {
  uint8_t* first = nullptr;
  int32_t room = 0;  // for so many: all of those that a prepare counted

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

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_
