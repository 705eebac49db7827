#include "cuda/nccl/exchange.h"

namespace ep_runtime {
namespace nccl {

Peers PeersOf(int64_t ep_rank, int64_t ep_size, int64_t node_size, bool rail) {
  if (node_size == 0) return {0, 1, ep_size, ep_rank};
  const int64_t local = ep_rank % node_size;
  if (rail) return {local, node_size, ep_size / node_size, ep_rank / node_size};
  return {ep_rank - local, 1, node_size, local};
}

int SendBlocks(const Api& api, const Peers& peers, const Blocks& blocks, Comm* comm,
               Stream stream) {
  const auto bytes = static_cast<size_t>(blocks.bytes);
  for (int64_t step = 1; step < peers.count; ++step) {
    // Round the ring, so that not all ranks begin with the same one.
    const int64_t to = (peers.self + step) % peers.count;
    const int64_t from = (peers.self - step + peers.count) % peers.count;
    const int to_rank = static_cast<int>(peers.first + to * peers.stride);
    const int from_rank = static_cast<int>(peers.first + from * peers.stride);
    const int sent = api.send(blocks.For(to), bytes, kInt8, to_rank, comm, stream);
    if (sent != kSuccess && sent != kInProgress) return sent;
    const int received = api.receive(blocks.From(from), bytes, kInt8, from_rank, comm, stream);
    if (received != kSuccess && received != kInProgress) return received;
  }
  return kSuccess;
}

}  // namespace nccl
}  // namespace ep_runtime
