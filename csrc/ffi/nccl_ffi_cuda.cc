// Custom calls that move blocks between the ranks of an EP domain over the group's communicators.
//
// They lack the command-buffer trait: NCCL puts a non-blocking communicator's kernels on the stream
// from a thread of its own, and a captured graph would keep a communicator in use that an abort
// must free. What is sent is sends and receives alone, also of the all-gather: it is a row of
// counts, and NCCL's own all-gather would connect rings, trees or NVLS multicast for it first.

#include "ffi/nccl_ffi_cuda.h"

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "cuda/driver.h"
#include "cuda/nccl/group.h"
#include "ffi/call_frame.h"
#include "ffi/read_call.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using xla::ffi::DataType;

// One device's part of one call.
struct NcclCall {
  CallFrame frame;
  cudaStream_t stream;
  nccl::Peers peers;
  bool gathers;         // every peer gets the one block there is
  int64_t block_bytes;  // of one peer

  const Buffer& blocks() const { return frame.args[2]; }
  uint8_t* result() const { return static_cast<uint8_t*>(frame.rets[0].data); }
  const uint8_t* BlockFor(int64_t peer) const {
    return static_cast<const uint8_t*>(blocks().data) + (gathers ? 0 : peer * block_bytes);
  }
};

int64_t BytesOf(const Buffer& buffer) {
  int64_t bytes = ElementBytes(buffer);
  for (int64_t dim : buffer.dims) bytes *= dim;
  return bytes;
}

bool IsFloat(DataType type) {
  switch (type) {
    case DataType::PRED:
    case DataType::S8:
    case DataType::S16:
    case DataType::S32:
    case DataType::S64:
    case DataType::U8:
    case DataType::U16:
    case DataType::U32:
    case DataType::U64:
      return false;
    default:
      return true;
  }
}

// (rank, layer_index, blocks) -> blocks of the peers; of an all-gather one block comes in.
Status CheckBlocks(NcclCall* call) {
  CallFrame& frame = call->frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  EP_RETURN_IF_ERROR(CheckArray(frame, "layer_index", frame.args[1], DataType::S32, {1}));
  Dims want = call->blocks().dims;
  if (call->gathers) {
    want.insert(want.begin(), call->peers.count);
  } else if (call->blocks().dim(0) != call->peers.count) {
    Dims dims = call->blocks().dims;
    if (dims.empty()) dims.push_back(0);
    dims[0] = call->peers.count;
    return CheckShape(frame, "blocks", call->blocks(), dims);
  }
  EP_RETURN_IF_ERROR(CheckArray(frame, "result", frame.rets[0], call->blocks().dtype, want));
  call->block_bytes = BytesOf(frame.rets[0]) / call->peers.count;
  return Status();
}

int Issue(const nccl::Api& api, const NcclCall& call, nccl::Comm* comm) {
  int worst = nccl::kSuccess;
  const auto bytes = static_cast<size_t>(call.block_bytes);
  for (int64_t step = 1; step < call.peers.count; ++step) {
    // Round the ring, so that not all ranks begin with the same one.
    const int64_t to = (call.peers.self + step) % call.peers.count;
    const int64_t from = (call.peers.self - step + call.peers.count) % call.peers.count;
    const auto rank_of = [&](int64_t peer) {
      return static_cast<int>(call.peers.first + peer * call.peers.stride);
    };
    const int sent =
        api.send(call.BlockFor(to), bytes, nccl::kInt8, rank_of(to), comm, call.stream);
    const int received = api.receive(call.result() + from * call.block_bytes, bytes, nccl::kInt8,
                                     rank_of(from), comm, call.stream);
    for (const int result : {sent, received}) {
      if (result != nccl::kSuccess && result != nccl::kInProgress) worst = result;
    }
  }
  return worst;
}

// Of a call that failed: NaN in floats, 0 in integers, as kernels leave it.
Status Fill(const NcclCall& call) {
  const int byte = IsFloat(call.frame.rets[0].dtype) ? 0xFF : 0;
  return cuda::Check(
      cudaMemsetAsync(call.result(), byte, call.block_bytes * call.peers.count, call.stream),
      "cudaMemsetAsync");
}

Status Exchange(nccl::Group& group, nccl::Communicator& communicator, const NcclCall& call) {
  if (call.block_bytes == 0) return Status();
  // What an abort leaves in integers may become an index before anybody hears of it.
  if (!IsFloat(call.frame.rets[0].dtype)) EP_RETURN_IF_ERROR(Fill(call));
  EP_RETURN_IF_CUDA(cudaMemcpyAsync(call.result() + call.peers.self * call.block_bytes,
                                    call.BlockFor(call.peers.self), call.block_bytes,
                                    cudaMemcpyDeviceToDevice, call.stream));
  if (call.peers.count == 1) return Status();
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  const Status status =
      group.Run(communicator, [&](nccl::Comm* comm) { return Issue(*api, call, comm); });
  // XLA hears of it at the next run, on every device of the process alike.
  return status.ok() ? status : Fill(call);
}

Status RunInGroup(nccl::Group& group, uint64_t run, int64_t node_size, bool rail, NcclCall* call) {
  EP_RETURN_IF_ERROR(group.Decide(run));
  const int64_t ep_size = group.options().ep_size;
  if (node_size < 0 || (node_size > 0 && ep_size % node_size != 0)) {
    return InvalidArgument("node_size must be 0 or divide the ep size " + std::to_string(ep_size) +
                           ", got " + std::to_string(node_size));
  }
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  nccl::Communicator* communicator = group.OfDevice(device);
  if (communicator == nullptr) {
    return InvalidArgument("CUDA device " + std::to_string(device) + " drives no rank of group " +
                           group.options().name + "; the program runs on another mesh")
        .With("argument", std::string("mesh"));
  }
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
  std::string layer;
  std::shared_ptr<nccl::Group> group;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(attributes.layer_id, attributes.fingerprint,
                                                       &layer, &group));
  if (!group->BeginCall()) return group->ClosedError(layer);
  const Status status = RunInGroup(*group, run, *node_size, *rail != 0, call);
  group->EndCall();
  return status;
}

template <bool gathers>
ffi::Error Execute(cudaStream_t stream, ffi::RunId run, ffi::Dictionary attrs,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  NcclCall call{};
  call.stream = stream;
  call.gathers = gathers;
  call.frame.call = gathers ? "ep_nccl_all_gather_v1" : "ep_nccl_exchange_v1";
  Status status = ReadFrame(args, rets, &call.frame);
  if (status.ok()) status = CallNccl(static_cast<uint64_t>(run.run_id), attrs, &call);
  return status.ok() ? ffi::Error::Success() : ToXla(status);
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
