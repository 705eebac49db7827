// Reports to peers which sums of a block are in their windows: one warp reports for the whole
// block.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_LANDED_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_LANDED_SUMS_CUH_

#include "cuda/movement/call/block_words.cuh"
#include "cuda/movement/call/call.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

// A sum's destination: the flag that its peer waits for.
struct SumPlace {
  int32_t rank;
  int32_t flag;
};

// Lists in shared memory the landed sums of each sending warp. Before a flag there must be a fence
// of system scope, which waits for all stores of the multiprocessor. So sending warps execute no
// fence: the publishing warp executes one fence, then stores the flags of all landed sums.
template <int kSenders>
struct LandedSums {
  static_assert(kSenders < 32);
  static constexpr uint32_t kPlaces = 8;  // sums of one warp that wait to be published

  unsigned long long places[kSenders][kPlaces];  // rank in the upper half, flag
  uint32_t landed[kSenders];
  uint32_t published[kSenders];
  uint32_t ended;  // warps that have sent everything

  // Every thread calls this, and syncs with its block before it uses other members.
  __device__ void Clear() {
    if (threadIdx.x < kSenders) landed[threadIdx.x] = published[threadIdx.x] = 0;
    if (threadIdx.x == 0) ended = 0;
  }
  // One thread of a sending warp reports a sum that the warp stored before its last sync. Waits
  // only for the publishing warp, which waits for nobody.
  __device__ void Land(int sender, const SumPlace& place) {
    const uint32_t number = LoadAcquireBlock(&landed[sender]);
    while (number - LoadAcquireBlock(&published[sender]) >= kPlaces) __nanosleep(100);
    const auto rank = static_cast<unsigned long long>(place.rank);
    atomicExch(&places[sender][number % kPlaces], rank << 32 | static_cast<uint32_t>(place.flag));
    AddReleaseBlock(&landed[sender], 1);
  }
  __device__ void End() { AddReleaseBlock(&ended, 1); }

  // The publishing warp runs this until all sending warps have ended.
  __device__ void Publish(const DeviceCall& call) {
    const int lane = threadIdx.x % 32;
    uint32_t done = 0;  // lane i: published sums of warp i
    while (true) {
      const bool last = __all_sync(~0u, LoadAcquireBlock(&ended) == kSenders);
      const uint32_t here = lane < kSenders ? LoadAcquireBlock(&landed[lane]) : 0;
      if (!__any_sync(~0u, here != done)) {
        if (last) return;
        __nanosleep(100);
        continue;
      }
      FenceSys();
      const uint32_t before = done;
      for (; done != here; ++done) {
        const unsigned long long place = atomicOr(&places[lane][done % kPlaces], 0ull);
        const auto rank = static_cast<int>(place >> 32);
        StoreRelaxedSys(call.Ready(rank, call.me) + static_cast<uint32_t>(place), call.tag);
      }
      if (done != before) AddReleaseBlock(&published[lane], done - before);
      __syncwarp();
    }
  }
};

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_LANDED_SUMS_CUH_
