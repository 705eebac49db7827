// RingPlace: a place in a ring of buffers.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_RING_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_RING_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {
namespace gemm {

// A place in a ring of buffers, and the parity that its barriers have in this round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_RING_CUH_
