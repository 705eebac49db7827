// Who takes which sums of a launch.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_WORK_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/combine/combine_kernels.h"

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
