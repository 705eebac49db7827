// Issues the sends and receives of an exchange over NCCL.
#ifndef EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_
#define EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_

#include <cstdint>
#include <vector>

#include "cuda/nccl/api.h"

namespace ep_runtime {
namespace nccl {

// Ranks of an EP domain that take part in one exchange: first, first + stride, ...
struct Peers {
  int64_t first;
  int64_t stride;
  int64_t count;
  int64_t self;  // index of this rank among them
};

// Returns the peers of a rank. With `node_size` 0 the peers are all ranks of the domain. Otherwise
// they are the ranks with the same index on each node (`rail`), or all ranks of this node.
// `node_size` divides `ep_size`.
Peers PeersOf(int64_t ep_rank, int64_t ep_size, int64_t node_size, bool rail);

struct Blocks {
  const uint8_t* sent;  // [count] blocks, or with `gathers` one block that every peer gets
  uint8_t* received;    // [count] blocks
  int64_t bytes;        // bytes of one block
  bool gathers;         // every peer gets the same block

  const uint8_t* For(int64_t peer) const { return sent + (gathers ? 0 : peer * bytes); }
  uint8_t* From(int64_t peer) const { return received + peer * bytes; }
};

// Rows to send and to receive, any number for each peer. Row numbers and counts are in host memory.
struct CountedRows {
  const uint8_t* sent;
  uint8_t* received;
  int64_t row_bytes;
  const int64_t* sent_first;      // [count] first row to each peer
  const int32_t* sent_count;      // [count]
  const int64_t* received_first;  // [count] first row from each peer
  const int32_t* received_count;  // [count]

  const uint8_t* For(int64_t peer) const { return sent + sent_first[peer] * row_bytes; }
  uint8_t* From(int64_t peer) const { return received + received_first[peer] * row_bytes; }
};

// Like SendBlocks, but sends only the counted rows, and no message if a peer gets none.
int SendRows(const Api& api, const Peers& peers, const CountedRows& rows, Comm* comm,
             Stream stream);

// Sends to and receives from all peers except this rank, inside the caller's NCCL group. Returns
// the first error, or success.
int SendBlocks(const Api& api, const Peers& peers, const Blocks& blocks, Comm* comm, Stream stream);
// Runs SendBlocks for several arrays. Skips arrays without bytes.
int SendArrays(const Api& api, const Peers& peers, const std::vector<Blocks>& arrays, Comm* comm,
               Stream stream);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_EXCHANGE_H_
