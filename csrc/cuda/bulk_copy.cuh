// Bulk asynchronous copies between global memory (this device's or a peer's) and shared memory.
//
// One thread issues a buffer's copies and waits for them, because bulk groups belong to a thread.
#ifndef EP_RUNTIME_CUDA_BULK_COPY_CUH_
#define EP_RUNTIME_CUDA_BULK_COPY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Orders memory accesses of this thread with accesses of the copy engine.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Barrier for loads into one buffer.
struct LoadBarrier {
  uint64_t word;

  __device__ void Init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&word)) : "memory");
  }
  __device__ void Load(void* shared, const void* global, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(&word)),
        "r"(bytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(SharedAddress(shared)),
        "l"(global), "r"(bytes), "r"(SharedAddress(&word))
        : "memory");
  }
  __device__ void Wait(uint32_t parity) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(SharedAddress(&word)), "r"(parity)
          : "memory");
    }
  }
};

__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  FenceProxyAsync();
}

__device__ __forceinline__ void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most kPending groups of stores are incomplete.
template <int kPending>
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BULK_COPY_CUH_
