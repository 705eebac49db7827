// Kernels that only benchmarks run: they measure the links' peak bandwidth and read the device's
// clock.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_BENCH_BENCH_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_BENCH_BENCH_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// Measures the links' peak bandwidth with the simplest kernel that moves rows like dispatch: every
// warp copies whole rows from local memory through one buffer to their ranks. The kernel has no
// plan, sets no flags and places no rows.
//
// The kernel takes no epoch, waits for nobody, and writes into this rank's part of lane 0 of its
// peers. So run the kernel only while no other call of the group runs.
struct CeilingParams {
  DeviceGroup* group;       // device, never freed; once closed, the kernel writes nothing
  const void* rows;         // [at least `count`, row_bytes], device, written by XLA
  const int32_t* dst_rank;  // [count, top_k], device: the row's rank, -1: not sent
  const int32_t* dst_row;   // [count, top_k], device: row in this rank's part of the lane
  int32_t count;
  int32_t top_k;
  int32_t row_bytes;  // a multiple of 16
  int32_t blocks;
  int32_t warps;    // warps of a block, at most 32; fewer if their buffers do not fit
  int32_t* result;  // [1], device: number of blocks
};
cudaError_t LaunchCeiling(cudaStream_t stream, const CeilingParams& params);

// Reads the device's clock. Passing one call's `token_out` as the next call's `token` orders the
// two. The stream stays busy for `hold_ns` after the reading, so that the host can launch more work
// meanwhile.
struct ClockParams {
  const int32_t* token;  // [1], device
  int32_t* token_out;    // [1], device
  uint32_t* now;         // [2], device: nanoseconds, low word first
  uint64_t hold_ns;
};
cudaError_t LaunchClock(cudaStream_t stream, const ClockParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_BENCH_BENCH_KERNELS_H_
