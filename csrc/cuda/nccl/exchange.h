#ifndef EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_
#define EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_

#include <cstdint>
#include <vector>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// The ranks of an EP domain that one exchange is between: first, first + stride, ...
struct Peers {
  int64_t first;
  int64_t stride;
  int64_t count;
  int64_t self;  // which of them this rank is
};

// Which ranks those are: all of the domain with `node_size` 0, else every rank of the same place on
// its node (`rail`), or all of this node. `node_size` divides `ep_size`.
Peers PeersOf(int64_t ep_rank, int64_t ep_size, int64_t node_size, bool rail);

struct Blocks {
  const uint8_t* sent;  // [count] blocks, or the one that every peer gets
  uint8_t* received;    // [count] blocks
  int64_t bytes;        // of a block
  bool gathers;         // there is one block to send

  const uint8_t* For(int64_t peer) const { return sent + (gathers ? 0 : peer * bytes); }
  uint8_t* From(int64_t peer) const { return received + peer * bytes; }
};

// The first rows of every block, as many as each peer wants and has.
struct CountedBlocks {
  Blocks blocks;  // of rows of row_bytes
  int64_t row_bytes;
  const int32_t* sent;      // [count] rows for each peer, host
  const int32_t* received;  // [count] rows from each
};

// As SendBlocks, of those rows alone; nothing goes where there are none.
int SendRows(const Api& api, const Peers& peers, const CountedBlocks& counted, Comm* comm,
             Stream stream);

// Sends and receives of all peers but this rank, inside an NCCL group of the caller's. The first
// result that is an error, else success.
int SendBlocks(const Api& api, const Peers& peers, const Blocks& blocks, Comm* comm, Stream stream);
// The same of several arrays, of those that have bytes.
int SendArrays(const Api& api, const Peers& peers, const std::vector<Blocks>& arrays, Comm* comm,
               Stream stream);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_
