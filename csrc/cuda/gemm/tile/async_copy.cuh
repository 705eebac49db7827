// Tensor copies between global and shared memory of a cluster's blocks, and the barriers that count
// their bytes.
//
// Shared memory is named by its 32-bit address in the shared window, as the instructions take it.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_ASYNC_COPY_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_ASYNC_COPY_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {
namespace gemm {

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// `threads` threads of this block; id 0 is __syncthreads.
__device__ __forceinline__ void SyncNamed(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Shows this thread's writes of shared memory to tensor copies and products.
__device__ __forceinline__ void FenceSharedForCopies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void ExpectBytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Shows this thread's accesses of shared memory to those of this block who wait.
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of the same address in block `rank` of the cluster. Says nothing of this
// thread's ordinary writes: what it tells of is that products have read.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

struct Coordinates {
  int32_t x;  // along memory
  int32_t y;
  int32_t z;
};

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One array, or two that stand for one whose lines are theirs behind each other.
struct Halves {
  const CUtensorMap* first;
  const CUtensorMap* second;
  int32_t width;  // of the first, a multiple of a box; INT32_MAX: there is one array
};
// The map that has what is at `x` along memory; `x` becomes its place there.
__device__ __forceinline__ const CUtensorMap* FindHalf(const Halves& halves, int32_t* x) {
  if (*x < halves.width) return halves.first;
  *x -= halves.width;
  return halves.second;
}

// One box of the map to `shared`; its bytes count at `barrier`.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, Coordinates at, uint32_t shared,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// The same to these addresses in every block of the cluster that `blocks` has a bit of.
__device__ __forceinline__ void LoadBoxInto(uint16_t blocks, const CUtensorMap* map, Coordinates at,
                                            uint32_t shared, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "h"(blocks)
      : "memory");
}
// What lies outside of the map's dims is not written.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, Coordinates at, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// The same, added to what is there in the map's type.
__device__ __forceinline__ void AddBox(const CUtensorMap* map, Coordinates at, uint32_t shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(shared), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_ASYNC_COPY_CUH_
