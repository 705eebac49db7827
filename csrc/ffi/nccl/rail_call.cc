// RailCall: a call beside which arrays cross between nodes.
#include "ffi/nccl/rail_call.h"

#include <algorithm>
#include <string>

#include "cuda/device/driver.h"

namespace ep_runtime {

Status ReadBlocks(const Operand& given, const Operand& result, int64_t peers, bool gathers,
                  nccl::Blocks* out) {
  Dims want = given.dims();
  if (gathers) {
    want.insert(want.begin(), peers);
  } else if (want.empty() || want[0] != peers) {
    want.resize(std::max<size_t>(want.size(), 1));
    want[0] = peers;
    return given.CheckShape(want);
  }
  EP_RETURN_IF_ERROR(result.Read(given.type(), want, &out->received));
  out->sent = static_cast<const uint8_t*>(given.data());
  out->bytes = result.element_bytes();
  for (size_t i = 1; i < want.size(); ++i) out->bytes *= want[i];
  out->gathers = gathers;
  return Status();
}

Status RailCall::FindCommunicator(const CudaCall& call, int64_t node_size) {
  EP_RETURN_IF_ERROR(group_->Decide(call.run));
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  communicator_ = group_->OfDevice(device);
  if (communicator_ == nullptr) return OtherMesh(device, group_->options().name);
  const int64_t ep_size = group_->options().ep_size;
  if (node_size < 1 || ep_size % node_size != 0) {
    return InvalidArgument("node_size must divide the ep size " + std::to_string(ep_size) +
                           ", got " + std::to_string(node_size));
  }
  peers_ = nccl::PeersOf(communicator_->place().rank, ep_size, node_size, /*rail=*/true);
  EP_RETURN_IF_ERROR(nccl::Load("", &api_));
  return nccl::SideStream::OfDevice(&side_);
}

Status RailCall::Open(const CudaCall& call, int64_t node_size) {
  name_ = call.frame.call;
  main_ = call.stream;
  nccl::Layer layer;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(
      call.attributes.layer_id, call.attributes.fingerprint, &layer, &group_));
  if (!group_->BeginCall()) {
    const Status closed = group_->ClosedError(layer.name);
    group_ = nullptr;
    return closed;
  }
  return FindCommunicator(call, node_size);
}

Status RailCall::Begin(const std::vector<nccl::Blocks>& arrays, bool own) {
  EP_RETURN_IF_ERROR(side_->Follow(main_));
  for (const nccl::Blocks& each : arrays) {
    if (!own || each.bytes == 0) continue;
    EP_RETURN_IF_CUDA(cudaMemcpyAsync(each.From(me()), each.For(me()), each.bytes,
                                      cudaMemcpyDeviceToDevice, side_->stream()));
  }
  return Start([&](nccl::Comm* comm) {
    return nccl::SendArrays(*api_, peers_, arrays, comm, side_->stream());
  });
}

Status RailCall::BeginCounted(const int32_t* counts, CountedArrays* first, CountedArrays* second) {
  std::vector<int32_t> found(4 * peers_.count);
  const Status status = ReadCounts(*group_, name_, main_, counts, &found);
  if (!status.ok()) {
    lost_ = !group_->Ended(status).ok();
    return Status();
  }
  first->Take(found.data());
  second->Take(found.data() + 2 * peers_.count);
  EP_RETURN_IF_ERROR(side_->Follow(main_));
  EP_RETURN_IF_ERROR(first->CopyOwn(side_->stream()));
  EP_RETURN_IF_ERROR(second->CopyOwn(side_->stream()));
  return Start([&](nccl::Comm* comm) {
    const int result = first->Send(*api_, comm, side_->stream());
    return result != nccl::kSuccess ? result : second->Send(*api_, comm, side_->stream());
  });
}

template <typename Issue>
Status RailCall::Start(const Issue& issue) {
  const Status status = group_->Issue(*communicator_, peers_, issue);
  lost_ = !status.ok();
  begun_ = status.ok();
  return Status();
}

Status RailCall::Await() {
  if (begun_) lost_ = !group_->Await(*communicator_).ok();
  begun_ = false;
  return side_->Join(main_);
}

Status RailCall::End(const CudaCall& call, size_t first, size_t last, Status status) {
  if (group_ == nullptr) return status;
  if (begun_) Await();  // the call failed before Await
  for (size_t i = first; i < last && status.ok(); ++i) {
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
