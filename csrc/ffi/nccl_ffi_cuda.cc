// Custom calls that move blocks between the ranks of an EP domain over the group's communicators.
//
// They lack the command-buffer trait: NCCL puts a non-blocking communicator's kernels on the stream
// from a thread of its own, and a captured graph would keep a communicator in use that an abort
// must free; so an exchange that one call begins and another awaits is never half in a graph. What
// is sent is sends and receives alone, also of the all-gather: it is a row of counts, and NCCL's
// own all-gather would connect rings, trees or NVLS multicast for it first.

#include "ffi/nccl_ffi_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "ffi/call_frame.h"
#include "ffi/read_call.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using xla::ffi::DataType;

// One array of a call.
struct Moved {
  nccl::Blocks blocks;
  Buffer result;
};

// One device's part of one call.
struct NcclCall {
  CallFrame frame;
  cudaStream_t stream;
  nccl::Peers peers;
  std::vector<Moved> arrays;
  int64_t flights;  // that are awaited
};

// One of our four targets: checks its operands and moves, on the communicator of its device.
using NcclFn = Status (*)(nccl::Group& group, nccl::Communicator& communicator, NcclCall* call);

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

// blocks [P, ...] -> [P, ...]; of an all-gather block [...] -> [P, ...].
Status AddArray(NcclCall* call, const Buffer& given, const Buffer& result, bool gathers) {
  const CallFrame& frame = call->frame;
  Dims want = given.dims;
  if (gathers) {
    want.insert(want.begin(), call->peers.count);
  } else if (want.empty() || want[0] != call->peers.count) {
    want.resize(std::max<size_t>(want.size(), 1));
    want[0] = call->peers.count;
    return CheckShape(frame, "blocks", given, want);
  }
  EP_RETURN_IF_ERROR(CheckArray(frame, "result", result, given.dtype, want));
  const nccl::Blocks blocks{static_cast<const uint8_t*>(given.data),
                            static_cast<uint8_t*>(result.data), BytesOf(result) / call->peers.count,
                            gathers};
  if (blocks.bytes > 0) call->arrays.push_back({blocks, result});
  return Status();
}

// Of a call that failed: NaN in floats, 0 in integers, as kernels leave it.
uint8_t Filling(const Moved& array) { return IsFloat(array.result.dtype) ? 0xFF : 0; }

Status Fill(const NcclCall& call, const Moved& array) {
  return cuda::Check(
      cudaMemsetAsync(array.blocks.received, Filling(array), BytesOf(array.result), call.stream),
      "cudaMemsetAsync");
}

Status Exchange(nccl::Group& group, nccl::Communicator& communicator, const NcclCall& call) {
  const nccl::Peers& peers = call.peers;
  for (const Moved& array : call.arrays) {
    const nccl::Blocks& blocks = array.blocks;
    EP_RETURN_IF_CUDA(cudaMemcpyAsync(blocks.From(peers.self), blocks.For(peers.self), blocks.bytes,
                                      cudaMemcpyDeviceToDevice, call.stream));
  }
  if (peers.count == 1 || call.arrays.empty()) return Status();
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  const Status status = group.Run(communicator, peers, [&](nccl::Comm* comm) {
    int result = nccl::kSuccess;
    for (const Moved& array : call.arrays) {
      if (result != nccl::kSuccess) break;
      result = nccl::SendBlocks(*api, peers, array.blocks, comm, call.stream);
    }
    return result;
  });
  for (const Moved& array : call.arrays) {
    if (!status.ok()) break;
    // What an abort leaves may become an index or a trip count before anybody hears of it.
    EP_RETURN_IF_ERROR(communicator.side()->Guard(call.stream, array.blocks.received,
                                                  BytesOf(array.result), Filling(array)));
  }
  if (status.ok()) return status;
  // XLA hears of it at the next run, on every device of the process alike.
  for (const Moved& array : call.arrays) EP_RETURN_IF_ERROR(Fill(call, array));
  return Status();
}

// A second operand is not read: benches chain calls by it.
template <bool gathers>
Status MoveBlocks(nccl::Group& group, nccl::Communicator& communicator, NcclCall* call) {
  const CallFrame& frame = call->frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, frame.args.size() == 2 ? 2 : 1, 1));
  EP_RETURN_IF_ERROR(AddArray(call, frame.args[0], frame.rets[0], gathers));
  return Exchange(group, communicator, *call);
}

Status CheckSameBuffer(const CallFrame& frame, const Buffer& result, const Buffer& operand) {
  EP_RETURN_IF_ERROR(CheckArray(frame, "result", result, operand.dtype, operand.dims));
  if (result.data == operand.data || operand.empty()) return Status();
  return Internal(std::string(frame.call) +
                  ": XLA gave a result another buffer than its operand's");
}

// (blocks..., layer_index) -> (received..., the blocks, layer_index), the latter two in the
// operands' buffers. NCCL moves them on the communicator's own stream, behind what XLA's has by
// now.
Status BeginBlocks(nccl::Group& group, nccl::Communicator& communicator, NcclCall* call) {
  const CallFrame& frame = call->frame;
  if (frame.args.size() < 2) return CheckCount(frame, 2, 3);
  const size_t count = frame.args.size() - 1;
  EP_RETURN_IF_ERROR(CheckCount(frame, count + 1, 2 * count + 1));
  for (size_t i = 0; i <= count; ++i) {
    EP_RETURN_IF_ERROR(CheckSameBuffer(frame, frame.rets[count + i], frame.args[i]));
  }
  for (size_t i = 0; i < count; ++i) {
    EP_RETURN_IF_ERROR(AddArray(call, frame.args[i], frame.rets[i], /*gathers=*/false));
  }
  nccl::SideStream* side = communicator.side();
  EP_RETURN_IF_ERROR(side->Follow(call->stream));
  call->stream = static_cast<cudaStream_t>(side->stream());
  EP_RETURN_IF_ERROR(Exchange(group, communicator, *call));
  return side->Mark(frame.rets[0].data);
}

// (received..., the blocks, layer_index) -> (received...), in the operands' buffers: what XLA's
// stream has from here on runs when they are there. Of several exchanges that were begun alike, one
// after the other: all they received, then all their blocks. XLA drops a call whose results nobody
// reads, and with it what keeps the buffers of its exchange; so those of one result are one call.
Status AwaitBlocks(nccl::Group&, nccl::Communicator& communicator, NcclCall* call) {
  const CallFrame& frame = call->frame;
  const size_t count = frame.rets.size();
  if (count == 0) return CheckCount(frame, 3, 1);
  EP_RETURN_IF_ERROR(CheckCount(frame, 2 * count + 1, count));
  if (call->flights < 1 || count % call->flights != 0) {
    return InvalidArgument("flights must divide the " + std::to_string(count) +
                           " arrays that arrive, got " + std::to_string(call->flights));
  }
  for (size_t i = 0; i < count; ++i) {
    EP_RETURN_IF_ERROR(CheckSameBuffer(frame, frame.rets[i], frame.args[i]));
  }
  for (size_t i = 0; i < count; i += count / call->flights) {
    EP_RETURN_IF_ERROR(communicator.side()->Await(frame.args[i].data, call->stream));
  }
  return Status();
}

Status RunInGroup(nccl::Group& group, uint64_t run, int64_t node_size, bool rail, NcclFn move,
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
  if (communicator == nullptr) {
    return InvalidArgument("CUDA device " + std::to_string(device) + " drives no rank of group " +
                           group.options().name + "; the program runs on another mesh")
        .With("argument", std::string("mesh"));
  }
  call->peers = nccl::PeersOf(communicator->place().rank, ep_size, node_size, rail);
  return move(group, *communicator, call);
}

Status CallNccl(uint64_t run, const ffi::Dictionary& attrs, NcclFn move, NcclCall* call) {
  Attributes attributes{};
  EP_RETURN_IF_ERROR(ReadAttributes(attrs, &attributes));
  const auto node_size = attrs.get<int64_t>("node_size");
  const auto rail = attrs.get<int64_t>("rail");
  if (node_size.has_error() || rail.has_error()) {
    return InvalidArgument("attributes must hold node_size and rail as int64");
  }
  const auto flights = attrs.get<int64_t>("flights");
  call->flights = flights.has_error() ? 1 : *flights;
  std::string layer;
  std::shared_ptr<nccl::Group> group;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(attributes.layer_id, attributes.fingerprint,
                                                       &layer, &group));
  if (!group->BeginCall()) return group->ClosedError(layer);
  const Status status = RunInGroup(*group, run, *node_size, *rail != 0, move, call);
  group->EndCall();
  return status;
}

ffi::Error Execute(const char* name, NcclFn move, cudaStream_t stream, ffi::RunId run,
                   const ffi::Dictionary& attrs, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  NcclCall call{};
  call.stream = stream;
  call.frame.call = name;
  Status status = ReadFrame(args, rets, &call.frame);
  if (status.ok()) status = CallNccl(static_cast<uint64_t>(run.run_id), attrs, move, &call);
  return status.ok() ? ffi::Error::Success() : ToXla(status);
}

#define EP_RUNTIME_NCCL_TARGET(symbol, name, move)                                       \
  ffi::Error symbol##Execute(cudaStream_t stream, ffi::RunId run, ffi::Dictionary attrs, \
                             ffi::RemainingArgs args, ffi::RemainingRets rets) {         \
    return Execute(name, move, stream, run, attrs, args, rets);                          \
  }                                                                                      \
  XLA_FFI_DEFINE_HANDLER(symbol, symbol##Execute,                                        \
                         ffi::Ffi::Bind()                                                \
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()                   \
                             .Ctx<ffi::RunId>()                                          \
                             .Attrs()                                                    \
                             .RemainingArgs()                                            \
                             .RemainingRets())

EP_RUNTIME_NCCL_TARGET(kExchangeV1, "ep_nccl_exchange_v1", MoveBlocks<false>);
EP_RUNTIME_NCCL_TARGET(kAllGatherV1, "ep_nccl_all_gather_v1", MoveBlocks<true>);
EP_RUNTIME_NCCL_TARGET(kBeginV1, "ep_nccl_begin_v1", BeginBlocks);
EP_RUNTIME_NCCL_TARGET(kArrivedV1, "ep_nccl_arrived_v1", AwaitBlocks);

}  // namespace

XLA_FFI_Error* NcclExchangeV1(XLA_FFI_CallFrame* frame) { return kExchangeV1(frame); }
XLA_FFI_Error* NcclAllGatherV1(XLA_FFI_CallFrame* frame) { return kAllGatherV1(frame); }
XLA_FFI_Error* NcclBeginV1(XLA_FFI_CallFrame* frame) { return kBeginV1(frame); }
XLA_FFI_Error* NcclArrivedV1(XLA_FFI_CallFrame* frame) { return kArrivedV1(frame); }

}  // namespace ep_runtime
