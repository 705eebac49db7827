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

// One call of a group whose nodes are one rank each: exchanges go on a stream of their own, beside
// the kernels of the call.
class RailCall {
 public:
  // Finds the communicator. End comes last, whatever comes of it.
  Status Open(const CudaCall& call);
  // The first `results` of a call whose communicator is aborted by the time they are there become
  // NaN; those of one that could not be made too, and XLA hears of it at the next run, on every
  // device of the process alike. Returns `status` of what came since Open.
  Status End(const CudaCall& call, size_t results, Status status);

  int64_t me() const { return peers_.self; }
  int64_t ranks() const { return peers_.count; }
  // The blocks cross behind what the call's stream has been given by now. Await comes next.
  Status Begin(const std::vector<nccl::Blocks>& arrays);
  // What the call's stream is given from here on comes behind them.
  Status Await();

 private:
  Status FindCommunicator(const CudaCall& call);

  std::shared_ptr<nccl::NcclGroup> group_;
  nccl::Communicator* communicator_ = nullptr;
  const nccl::Api* api_ = nullptr;
  nccl::SideStream* side_ = nullptr;
  nccl::Peers peers_{};
  cudaStream_t main_ = nullptr;
  bool begun_ = false;  // an exchange that nobody awaited yet
  bool lost_ = false;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_RAIL_CALL_H_
