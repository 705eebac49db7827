// Custom calls that move blocks between the ranks of an EP domain over the group's communicators.
//
// They lack the command-buffer trait: NCCL puts a non-blocking communicator's kernels on the stream
// from a thread of its own, and a captured graph would keep a communicator in use that an abort
// must free. What is sent is sends and receives alone, also of the all-gather: it is a row of
// counts, and NCCL's own all-gather would connect rings, trees or NVLS multicast for it first.

#include "ffi/nccl/nccl_ffi_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "ffi/call_frame.h"
#include "ffi/read_call.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

// One device's part of one call.
struct NcclCall {
  CallFrame frame;
  cudaStream_t stream;
  nccl::Peers peers;
  nccl::Blocks blocks;
};

// blocks [P, ...] -> [P, ...]; of an all-gather block [...] -> [P, ...]. A second operand is not
// read: benches chain calls by it.
Status CheckBlocks(NcclCall* call) {
  const CallFrame& frame = call->frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(frame.args.size() == 2 ? 2 : 1, 1));
  const auto [given] = frame.Args("blocks");
  const auto [result] = frame.Rets("result");
  Dims want = given.dims();
  if (call->blocks.gathers) {
    want.insert(want.begin(), call->peers.count);
  } else if (want.empty() || want[0] != call->peers.count) {
    want.resize(std::max<size_t>(want.size(), 1));
    want[0] = call->peers.count;
    return given.CheckShape(want);
  }
  EP_RETURN_IF_ERROR(result.Read(given.type(), want, &call->blocks.received));
  call->blocks.sent = static_cast<const uint8_t*>(given.data());
  call->blocks.bytes = frame.rets[0].bytes() / call->peers.count;
  return Status();
}

Status Exchange(nccl::NcclGroup& group, nccl::Communicator& communicator, const NcclCall& call) {
  const nccl::Peers& peers = call.peers;
  const nccl::Blocks& blocks = call.blocks;
  if (blocks.bytes == 0) return Status();
  EP_RETURN_IF_CUDA(cudaMemcpyAsync(blocks.From(peers.self), blocks.For(peers.self), blocks.bytes,
                                    cudaMemcpyDeviceToDevice, call.stream));
  if (peers.count == 1) return Status();
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  const Status status = group.Run(communicator, peers, [&](nccl::Comm* comm) {
    return nccl::SendBlocks(*api, peers, blocks, comm, call.stream);
  });
  // Of a call that failed: NaN in floats, 0 in integers, as kernels leave it.
  const uint8_t filling = LostByte(call.frame.rets[0].dtype);
  const int64_t bytes = call.frame.rets[0].bytes();
  // What an abort leaves may become an index or a trip count before anybody hears of it.
  if (status.ok()) {
    return communicator.mark()->Guard(call.stream, blocks.received, bytes, filling);
  }
  // XLA hears of it at the next run, on every device of the process alike.
  return cuda::Check(cudaMemsetAsync(blocks.received, filling, bytes, call.stream),
                     "cudaMemsetAsync");
}

Status RunInGroup(nccl::NcclGroup& group, uint64_t run, int64_t node_size, bool rail,
                  NcclCall* call) {
  EP_RETURN_IF_ERROR(group.Decide(run));
  const int64_t ep_size = group.options().ep_size;
  if (node_size < 0 || (node_size > 0 && ep_size % node_size != 0)) {
    return InvalidArgument("node_size must be 0 or divide the ep size " + std::to_string(ep_size) +
                           ", got " + std::to_string(node_size));
  }
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  nccl::Communicator* communicator = group.OfDevice(device);
  if (communicator == nullptr) return OtherMesh(device, group.options().name);
  call->peers = nccl::PeersOf(communicator->place().rank, ep_size, node_size, rail);
  EP_RETURN_IF_ERROR(CheckBlocks(call));
  return Exchange(group, *communicator, *call);
}

Status CallNccl(uint64_t run, const ffi::Dictionary& attrs, NcclCall* call) {
  Attributes attributes{};
  EP_RETURN_IF_ERROR(ReadAttributes(attrs, &attributes));
  const auto node_size = attrs.get<int64_t>("node_size");
  const auto rail = attrs.get<int64_t>("rail");
  if (node_size.has_error() || rail.has_error()) {
    return InvalidArgument("attributes must hold node_size and rail as int64");
  }
  nccl::Layer layer;
  std::shared_ptr<nccl::NcclGroup> group;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(attributes.layer_id, attributes.fingerprint,
                                                       &layer, &group));
  if (!group->BeginCall()) return group->ClosedError(layer.name);
  const Status status = RunInGroup(*group, run, *node_size, *rail != 0, call);
  group->EndCall();
  return status;
}

template <bool gathers>
ffi::Error Execute(cudaStream_t stream, ffi::RunId run, ffi::Dictionary attrs,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  NcclCall call{};
  call.stream = stream;
  call.blocks.gathers = gathers;
  call.frame.call = gathers ? "ep_nccl_all_gather_v1" : "ep_nccl_exchange_v1";
  return Answer(args, rets, &call.frame,
                [&] { return CallNccl(static_cast<uint64_t>(run.run_id), attrs, &call); });
}

#define EP_RUNTIME_NCCL_BINDING                 \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<ffi::RunId>()                        \
      .Attrs()                                  \
      .RemainingArgs()                          \
      .RemainingRets()
XLA_FFI_DEFINE_HANDLER(kExchangeV1, Execute<false>, EP_RUNTIME_NCCL_BINDING);
XLA_FFI_DEFINE_HANDLER(kAllGatherV1, Execute<true>, EP_RUNTIME_NCCL_BINDING);

}  // namespace

XLA_FFI_Error* NcclExchangeV1(XLA_FFI_CallFrame* frame) { return kExchangeV1(frame); }
XLA_FFI_Error* NcclAllGatherV1(XLA_FFI_CallFrame* frame) { return kAllGatherV1(frame); }

}  // namespace ep_runtime
