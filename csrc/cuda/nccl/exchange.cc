// Issues the sends and receives of an exchange over NCCL.
#include "cuda/nccl/exchange.h"

namespace ep_runtime {
namespace nccl {

Peers PeersOf(int64_t ep_rank, int64_t ep_size, int64_t node_size, bool rail) {
  if (node_size == 0) return {0, 1, ep_size, ep_rank};
  const int64_t local = ep_rank % node_size;
  if (rail) return {local, node_size, ep_size / node_size, ep_rank / node_size};
  return {ep_rank - local, 1, node_size, local};
}

namespace {

struct Message {
  const uint8_t* sent;
  size_t sent_bytes;
  uint8_t* received;
  size_t received_bytes;
};

bool IsFine(int result) { return result == kSuccess || result == kInProgress; }

// Sends to and receives from all peers. `make` returns the block to send to one peer and the block
// to receive from another.
template <typename Make>
int SendAll(const Api& api, const Peers& peers, Comm* comm, Stream stream, const Make& make) {
  for (int64_t step = 1; step < peers.count; ++step) {
    // Start with the next rank, so that ranks begin with different peers.
    const int64_t to = (peers.self + step) % peers.count;
    const int64_t from = (peers.self - step + peers.count) % peers.count;
    const int to_rank = static_cast<int>(peers.first + to * peers.stride);
    const int from_rank = static_cast<int>(peers.first + from * peers.stride);
    const Message message = make(to, from);
    if (message.sent_bytes > 0) {
      const int sent = api.send(message.sent, message.sent_bytes, kInt8, to_rank, comm, stream);
      if (!IsFine(sent)) return sent;
    }
    if (message.received_bytes > 0) {
      const int received =
          api.receive(message.received, message.received_bytes, kInt8, from_rank, comm, stream);
      if (!IsFine(received)) return received;
    }
  }
  return kSuccess;
}

}  // namespace

int SendBlocks(const Api& api, const Peers& peers, const Blocks& blocks, Comm* comm,
               Stream stream) {
  const auto bytes = static_cast<size_t>(blocks.bytes);
  return SendAll(api, peers, comm, stream, [&](int64_t to, int64_t from) {
    return Message{blocks.For(to), bytes, blocks.From(from), bytes};
  });
}

int SendArrays(const Api& api, const Peers& peers, const std::vector<Blocks>& arrays, Comm* comm,
               Stream stream) {
  for (const Blocks& blocks : arrays) {
    const int result = SendBlocks(api, peers, blocks, comm, stream);
    if (!IsFine(result)) return result;
  }
  return kSuccess;
}

int SendRows(const Api& api, const Peers& peers, const CountedRows& rows, Comm* comm,
             Stream stream) {
  const auto bytes = [&](int32_t count) { return static_cast<size_t>(count * rows.row_bytes); };
  return SendAll(api, peers, comm, stream, [&](int64_t to, int64_t from) {
    return Message{rows.For(to), bytes(rows.sent_count[to]), rows.From(from),
                   bytes(rows.received_count[from])};
  });
}

}  // namespace nccl
}  // namespace ep_runtime
