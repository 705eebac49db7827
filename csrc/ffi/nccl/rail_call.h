// RailCall: a call beside which arrays cross between nodes.
#ifndef EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_
#define EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "cuda/nccl/side_stream.h"
#include "ffi/call_frame.h"
#include "ffi/cuda_call.h"
#include "ffi/nccl/counted_arrays.h"

namespace ep_runtime {

// Reads an operand and a result of an exchange, both [peers, ...]; if it `gathers`, the operand is
// one block [...].
Status ReadBlocks(const Operand& given, const Operand& result, int64_t peers, bool gathers,
                  nccl::Blocks* out);

// One call of a group over nodes. Its exchange runs on a separate stream, so that it overlaps the
// kernels of the call.
class RailCall {
 public:
  // Finds the communicator, for peers on nodes of `node_size` ranks. Call End last, even if Open or
  // the call fails.
  Status Open(const CudaCall& call, int64_t node_size);
  // Ends the call. Its results from `first` to before `last` become NaN if the communicator is
  // aborted, or if the call failed. XLA gets the error at the next run, on every device of the
  // process. `status` is the outcome of everything since Open.
  Status End(const CudaCall& call, size_t first, size_t last, Status status);

  const nccl::Peers& peers() const { return peers_; }
  int64_t me() const { return peers_.self; }
  int64_t ranks() const { return peers_.count; }
  // Starts sending blocks after the present work of the call's stream; with `own`, also copies this
  // rank's own. Call Await next.
  Status Begin(const std::vector<nccl::Blocks>& arrays, bool own = false);
  // Sends and receives rows of both, by counts s32 [4, P] on the device: rows of `first` sent and
  // received, then those of `second`. Waits on the host until the counts are there.
  Status BeginCounted(const int32_t* counts, CountedArrays* first, CountedArrays* second);
  // Makes later work of the call's stream wait for the blocks.
  Status Await();

 private:
  Status FindCommunicator(const CudaCall& call, int64_t node_size);
  // Puts the sends and receives of `issue`, (communicator) -> NCCL's result, on the side stream.
  template <typename Issue>
  Status Start(const Issue& issue);

  std::shared_ptr<nccl::NcclGroup> group_;
  nccl::Communicator* communicator_ = nullptr;
  const nccl::Api* api_ = nullptr;
  nccl::SideStream* side_ = nullptr;
  nccl::Peers peers_{};
  std::string_view name_;
  cudaStream_t main_ = nullptr;
  bool begun_ = false;  // true: an exchange has begun and Await has not been called
  bool lost_ = false;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_
