// RailCall: a call of a group with one rank per node.
#include "ffi/nccl/rail_call.h"

#include "cuda/device/driver.h"

namespace ep_runtime {

Status RailCall::FindCommunicator(const CudaCall& call) {
  EP_RETURN_IF_ERROR(group_->Decide(call.run));
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  communicator_ = group_->OfDevice(device);
  if (communicator_ == nullptr) return OtherMesh(device, group_->options().name);
  peers_ = nccl::PeersOf(communicator_->place().rank, group_->options().ep_size, 1, /*rail=*/true);
  EP_RETURN_IF_ERROR(nccl::Load("", &api_));
  return nccl::SideStream::OfDevice(&side_);
}

Status RailCall::Open(const CudaCall& call) {
  main_ = call.stream;
  nccl::Layer layer;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(
      call.attributes.layer_id, call.attributes.fingerprint, &layer, &group_));
  if (!group_->BeginCall()) {
    const Status closed = group_->ClosedError(layer.name);
    group_ = nullptr;
    return closed;
  }
  return FindCommunicator(call);
}

Status RailCall::Begin(const std::vector<nccl::Blocks>& arrays) {
  EP_RETURN_IF_ERROR(side_->Follow(main_));
  const Status status = group_->Issue(*communicator_, peers_, [&](nccl::Comm* comm) {
    return nccl::SendArrays(*api_, peers_, arrays, comm, side_->stream());
  });
  lost_ = !status.ok();
  begun_ = status.ok();
  return Status();
}

Status RailCall::Await() {
  if (begun_) lost_ = !group_->Await(*communicator_).ok();
  begun_ = false;
  return side_->Join(main_);
}

Status RailCall::End(const CudaCall& call, size_t results, Status status) {
  if (group_ == nullptr) return status;
  if (begun_) Await();  // the call failed before Await
  for (size_t i = 0; i < results && status.ok(); ++i) {
    const Buffer& ret = call.frame.rets[i];
    const uint8_t filling = LostByte(ret.dtype);
    status = lost_ ? cuda::Check(cudaMemsetAsync(ret.data, filling, ret.bytes(), main_),
                                 "cudaMemsetAsync")
                   : communicator_->mark()->Guard(main_, ret.data, ret.bytes(), filling);
  }
  group_->EndCall();
  return status;
}

}  // namespace ep_runtime
