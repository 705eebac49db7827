// Accesses of words in shared memory that warps of a block exchange without a barrier.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_BLOCK_WORDS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_BLOCK_WORDS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"

namespace ep_runtime {
namespace cuda {

// Reads are atomic operations too, so that compute-sanitizer reports no races.
__device__ __forceinline__ uint32_t LoadAcquireBlock(const uint32_t* shared) {
  uint32_t value;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(SharedAddress(shared))
               : "memory");
  return value;
}
__device__ __forceinline__ void AddReleaseBlock(uint32_t* shared, uint32_t value) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(SharedAddress(shared)),
               "r"(value)
               : "memory");
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_BLOCK_WORDS_CUH_
