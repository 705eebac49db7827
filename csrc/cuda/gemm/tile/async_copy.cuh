// Tensor copies (TMA) between global memory and shared memory of a cluster's blocks, and the
// barriers that count their bytes.
//
// Instructions name shared memory by its 32-bit address in the shared window.
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
// Syncs all threads of all blocks of the cluster.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Syncs the 128 threads of a warpgroup of this block. Barrier 0 is __syncthreads.
__device__ __forceinline__ void SyncWarpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// Makes this thread's writes of shared memory visible to tensor copies and products.
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
// Arrives with release: waiting threads of this block see this thread's accesses of shared memory.
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of the same address in block `rank` of the cluster. It does not order this
// thread's ordinary writes: it only reports that products have read their operands.
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
  int32_t x;  // along the contiguous dim
  int32_t y;
  int32_t z;
};

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One array, or two whose lines are concatenated, and the arrays of the experts in slots.
struct Halves {
  const CUtensorMap* first;
  const CUtensorMap* second;
  const CUtensorMap* first_slots;
  const CUtensorMap* second_slots;
  int32_t width;  // width of the first array, a multiple of a box; INT32_MAX: there is one array
  int32_t first_slot;  // the first expert in a slot; INT32_MAX: none
};
// Returns the map that contains coordinate x of expert z, and makes both relative to that map.
__device__ __forceinline__ const CUtensorMap* FindHalf(const Halves& halves, Coordinates* at) {
  const bool first = at->x < halves.width;
  if (!first) at->x -= halves.width;
  if (at->z < halves.first_slot) return first ? halves.first : halves.second;
  at->z -= halves.first_slot;
  return first ? halves.first_slots : halves.second_slots;
}

// Copies one box of the map to `shared`. `barrier` counts its bytes.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, Coordinates at, uint32_t shared,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// Copies one box to the same addresses in every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void LoadBoxInto(uint16_t blocks, const CUtensorMap* map, Coordinates at,
                                            uint32_t shared, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "h"(blocks)
      : "memory");
}
// Copies a box to the map's array. Elements outside the map's dims are not written.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, Coordinates at, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// Adds a box to the map's array, in the map's type.
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
