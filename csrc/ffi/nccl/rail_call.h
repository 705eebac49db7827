// RailCall: a call of a group with one rank per node.
#ifndef EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_
#define EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "cuda/nccl/side_stream.h"
#include "ffi/cuda_call.h"

namespace ep_runtime {

// One call of a group with one rank per node. Exchanges run on a separate stream, so that they
// overlap the kernels of the call.
class RailCall {
 public:
  // Finds the communicator. Call End last, even if Open or the call fails.
  Status Open(const CudaCall& call);
  // Ends the call. Its first `results` results become NaN if the communicator is aborted, or if the
  // call failed. XLA gets the error at the next run, on every device of the process. `status` is
  // the outcome of everything since Open.
  Status End(const CudaCall& call, size_t results, Status status);

  int64_t me() const { return peers_.self; }
  int64_t ranks() const { return peers_.count; }
  // Starts sending blocks after the present work of the call's stream. Call Await next.
  Status Begin(const std::vector<nccl::Blocks>& arrays);
  // Makes later work of the call's stream wait for the blocks.
  Status Await();

 private:
  Status FindCommunicator(const CudaCall& call);

  std::shared_ptr<nccl::NcclGroup> group_;
  nccl::Communicator* communicator_ = nullptr;
  const nccl::Api* api_ = nullptr;
  nccl::SideStream* side_ = nullptr;
  nccl::Peers peers_{};
  cudaStream_t main_ = nullptr;
  bool begun_ = false;  // true: an exchange has begun and Await has not been called
  bool lost_ = false;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_
