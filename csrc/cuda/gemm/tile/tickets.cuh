// If several launches share a product, a cluster draws the number of its next pair of tiles from a
// counter in device memory. The cluster's first block draws, and passes the number to the second.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_TICKETS_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_TICKETS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

struct Tickets {
  uint32_t* words;    // [2], like GemmTickets::words; null: clusters take tiles in turn
  uint32_t clusters;  // number of clusters in all launches
};

// Words of a cluster's shared memory that both blocks access. A word is a whole message, so no
// other access needs to be ordered with it. Reads and writes are atomic operations, so that
// compute-sanitizer reports no races.
__device__ __forceinline__ uint64_t LoadWord(uint32_t word) {
  uint64_t value;
  asm volatile("atom.relaxed.cluster.shared::cta.or.b64 %0, [%1], 0;"
               : "=l"(value)
               : "r"(word)
               : "memory");
  return value;
}
__device__ __forceinline__ void StoreWordAt(uint32_t word, uint32_t rank, uint64_t value) {
  asm volatile(
      "{ .reg .b32 there; .reg .b64 before; mapa.shared::cluster.u32 there, %0, %1; "
      "atom.relaxed.cluster.shared::cluster.exch.b64 before, [there], %2; }" ::"r"(word),
      "r"(rank), "l"(value)
      : "memory");
}

// Returns the same ticket in all lanes of one warp in each block. `turn` counts a block's tickets
// from 1. `word` is this block's word, 0 at first. The second block's word gets the ticket, with
// its turn in the upper half. The first block's word gets the number of tickets that the second
// block has read; the first block writes the next ticket only after that.
__device__ __forceinline__ uint32_t DrawTicket(const Tickets& tickets, uint32_t rank, uint32_t turn,
                                               const uint64_t* word) {
  uint32_t ticket = 0;
  if (threadIdx.x % 32 == 0) {
    const uint32_t here = SharedAddress(word);
    if (rank == 0) {
      ticket = atomicAdd(tickets.words, 1u);
      while (LoadWord(here) + 1 < turn) {
      }
      StoreWordAt(here, 1, uint64_t{turn} << 32 | ticket);
    } else {
      uint64_t told;
      do {
        told = LoadWord(here);
      } while (told >> 32 != turn);
      ticket = static_cast<uint32_t>(told);
      StoreWordAt(here, 0, turn);
    }
  }
  return __shfl_sync(~0u, ticket, 0);
}

// One thread of every cluster calls this once, after its cluster found no ticket left. The last
// cluster resets the words for the next product.
__device__ __forceinline__ void EndTickets(const Tickets& tickets) {
  __threadfence();
  if (atomicAdd(tickets.words + 1, 1u) + 1 != tickets.clusters) return;
  tickets.words[0] = 0;
  tickets.words[1] = 0;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_TICKETS_CUH_
