// The CUDA library's parts around communicators, without CUDA: devices that always exist, and one
// call of an op.

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "ffi/nccl/nccl_table.h"

namespace ep_runtime {

namespace {

std::atomic<int> marks{0};
std::atomic<int> set_marks{0};
std::atomic<int> tried{0};
std::atomic<bool> no_mark{false};

class FakeMark : public nccl::AbortMark {
 public:
  FakeMark() { ++marks; }
  ~FakeMark() override { --marks; }
  void Set() override { ++set_marks; }
  Status Guard(nccl::Stream, void*, int64_t, uint8_t) override { return Status(); }
};

Status TrySum(nccl::Communicator& communicator, int64_t budget_ns, const nccl::Alive& alive) {
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  int32_t value = communicator.place().rank + 1;
  const auto issue = [&](nccl::Comm* comm) {
    return api->all_reduce(&value, &value, 1, nccl::kInt32, nccl::kSum, comm, nullptr);
  };
  EP_RETURN_IF_ERROR(communicator.Run(issue, budget_ns, alive));
  const int ranks = communicator.place().ranks;
  if (value == ranks * (ranks + 1) / 2) return Status();
  return Internal("an all-reduce gave " + std::to_string(value));
}

}  // namespace

nccl::Devices NcclDevices() {
  return {[](int) { return Status(); },
          [](nccl::Communicator&, int64_t, const nccl::Alive&) {
            ++tried;
            return Status();
          },
          [](std::unique_ptr<nccl::AbortMark>* out) -> Status {
            if (no_mark) return Internal("no mark");
            *out = std::make_unique<FakeMark>();
            return Status();
          },
          TrySum};
}

}  // namespace ep_runtime

// Runs an all-to-all of `bytes` per peer for the rank of `device`, like a handler. Returns 0, -1 if
// the run is refused, or -2 if the call fails. `text` gets the error.
extern "C" __attribute__((visibility("default"))) int64_t
TestExchange(int64_t group, uint64_t run, int device, int64_t node_size, int rail, int gathers,
             const uint8_t* from, uint8_t* to, int64_t bytes, char* text, int64_t size) {
  using namespace ep_runtime;  // NOLINT: like the library
  const std::shared_ptr<nccl::NcclGroup> found = nccl::ThisProcessGroups().FindGroup(group);
  Status status = found == nullptr ? Stale("no such group") : found->Decide(run);
  const bool runs = status.ok();
  if (runs) {
    nccl::Communicator* communicator = found->OfDevice(device);
    const nccl::Peers peers =
        nccl::PeersOf(communicator->place().rank, found->options().ep_size, node_size, rail != 0);
    const nccl::Api* api = nullptr;
    status = nccl::Load("", &api);
    const nccl::Blocks blocks{from, to, bytes, gathers != 0};
    std::memcpy(blocks.From(peers.self), blocks.For(peers.self), bytes);  // like a handler
    status = found->Run(*communicator, peers, [&](nccl::Comm* comm) {
      return nccl::SendBlocks(*api, peers, blocks, comm, nullptr);
    });
  }
  std::strncpy(text, status.text().c_str(), size - 1);
  return status.ok() ? 0 : runs ? -2 : -1;
}

// Returns the number of live abort marks. `none` makes further marks fail.
extern "C" __attribute__((visibility("default"))) int TestMarks(int none) {
  ep_runtime::no_mark = none != 0;
  return ep_runtime::marks;
}

// Returns the number of abort marks that were set.
extern "C" __attribute__((visibility("default"))) int TestMarksSet() {
  return ep_runtime::set_marks;
}

// Returns the number of first exchanges so far.
extern "C" __attribute__((visibility("default"))) int TestTried() { return ep_runtime::tried; }

// Writes {first, stride, count, self}.
extern "C" __attribute__((visibility("default"))) void TestPeers(int64_t rank, int64_t size,
                                                                 int64_t node_size, int rail,
                                                                 int64_t* out) {
  const auto peers = ep_runtime::nccl::PeersOf(rank, size, node_size, rail != 0);
  const int64_t values[] = {peers.first, peers.stride, peers.count, peers.self};
  std::memcpy(out, values, sizeof(values));
}
