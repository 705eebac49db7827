// What the links give to the simplest kernel of this shape: every warp copies whole rows from
// local memory through one buffer to the ranks that want them. No plan, no flags, no placement.
#ifndef EP_RUNTIME_TESTS_GPU_CEILING_CUH_
#define EP_RUNTIME_TESTS_GPU_CEILING_CUH_

#include "cuda/bulk_copy.cuh"

namespace gpu_test {

struct Windows {
  uint8_t* of[8];
};

// dst_rank and dst_row [rows, k]: where row i goes, -1 for nowhere.
__global__ void __launch_bounds__(1024, 1)
    CeilingKernel(Windows windows, const uint8_t* rows_in, const int32_t* dst_rank,
                  const int32_t* dst_row, int rows, int k, uint32_t row_bytes) {
  using namespace ep_runtime::cuda;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ LoadBarrier barriers[32];
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 != 0) return;
  uint8_t* buffer = dynamic + static_cast<size_t>(warp) * row_bytes;
  barriers[warp].Init();
  FenceBarrierInit();
  uint32_t parity = 0;
  for (int i = blockIdx.x * warps + warp; i < rows; i += gridDim.x * warps, parity ^= 1) {
    WaitStoresRead<0>();
    barriers[warp].Load(buffer, rows_in + static_cast<size_t>(i) * row_bytes, row_bytes);
    barriers[warp].Wait(parity);
    for (int j = 0; j < k; ++j) {
      const int rank = dst_rank[i * k + j];
      if (rank < 0) continue;
      const size_t row = dst_row[i * k + j];
      BulkStore(windows.of[rank] + row * row_bytes, buffer, row_bytes);
    }
    CommitStores();
  }
  WaitStores<0>();
}

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_CEILING_CUH_
