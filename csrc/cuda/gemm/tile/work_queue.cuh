// Work that the loading warp queues for the multiplying warpgroups, in shared memory.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_WORK_QUEUE_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_WORK_QUEUE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/tile/async_copy.cuh"
#include "cuda/gemm/tile/ring.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kQueuedWork = 4;

// One range of contracted elements that a tile sums over.
struct Work {
  int32_t row;
  int32_t column;
  int32_t row_end;
  int32_t expert;  // -1: no work is left
  int32_t group;
  int32_t size;   // contracted elements of the range
  int32_t last;   // 1: the last range of the tile
  int32_t start;  // first contracted element of the range
};
static_assert(sizeof(Work) == 2 * sizeof(int4), "as it is read");

struct WorkQueue {
  int4 work[kQueuedWork][2];
  uint64_t full[kQueuedWork];
  uint64_t empty[kQueuedWork];  // completes when every reading warp has taken the work
};

// Initialises the queue. One thread calls this, before the block's first barrier.
__device__ __forceinline__ void InitQueue(WorkQueue* queue, uint32_t reading_warps) {
  for (int i = 0; i < kQueuedWork; ++i) {
    InitBarrier(SharedAddress(&queue->full[i]), 1);
    InitBarrier(SharedAddress(&queue->empty[i]), reading_warps);
  }
}

// Queues one range. All lanes of the loading warp call this.
__device__ __forceinline__ void PushWork(const Work& work, RingPlace<kQueuedWork>* place,
                                         WorkQueue* queue) {
  if (threadIdx.x % 32 == 0) {
    WaitBarrier(SharedAddress(&queue->empty[place->stage]), place->parity ^ 1);
    queue->work[place->stage][0] = make_int4(work.row, work.column, work.row_end, work.expert);
    queue->work[place->stage][1] = make_int4(work.group, work.size, work.last, work.start);
    Arrive(SharedAddress(&queue->full[place->stage]));
  }
  __syncwarp();
  place->Advance();
}

// Tells the compiler that the value is the same in all lanes.
__device__ __forceinline__ int4 SameInWarp(int4 value) {
  return make_int4(__shfl_sync(0xFFFFFFFFu, value.x, 0), __shfl_sync(0xFFFFFFFFu, value.y, 0),
                   __shfl_sync(0xFFFFFFFFu, value.z, 0), __shfl_sync(0xFFFFFFFFu, value.w, 0));
}

// Takes the next range. All threads of a warpgroup call this.
__device__ __forceinline__ Work TakeWork(RingPlace<kQueuedWork>* place, WorkQueue* queue) {
  WaitBarrier(SharedAddress(&queue->full[place->stage]), place->parity);
  const int4 tile = SameInWarp(queue->work[place->stage][0]);
  const int4 range = SameInWarp(queue->work[place->stage][1]);
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&queue->empty[place->stage]));
  place->Advance();
  return {tile.x, tile.y, tile.z, tile.w, range.x, range.y, range.z, range.w};
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_WORK_QUEUE_CUH_
