// Custom calls that move blocks between the ranks of an EP domain over the group's communicators.
//
// These calls lack the command-buffer trait: NCCL's thread puts a non-blocking communicator's
// kernels on the stream, and a captured graph would keep a communicator in use that an abort must
// free. All exchanges are sends and receives, also the all-gather: it moves only a row of counts,
// and NCCL's own all-gather would first connect rings, trees or NVLS multicast.

#include "ffi/nccl/nccl_ffi_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "cuda/nccl/node_plan.h"
#include "ffi/call_frame.h"
#include "ffi/nccl/counted_arrays.h"
#include "ffi/nccl/rail_call.h"
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
  bool gathers = false;
  std::vector<nccl::Blocks> arrays;
  size_t first_result = 0;  // index of the result that receives the first array
};

// Reads any number of arrays. One more operand is not read: benchmarks use it to order calls.
Status CheckArrays(NcclCall* call) {
  const CallFrame& frame = call->frame;
  const size_t count = std::max<size_t>(frame.rets.size(), 1);
  EP_RETURN_IF_ERROR(frame.CheckCount(count + (frame.args.size() > count ? 1 : 0), count));
  for (size_t i = 0; i < count; ++i) {
    const Operand given(frame.call, "blocks", frame.args[i]);
    const Operand result(frame.call, "result", frame.rets[i]);
    nccl::Blocks blocks{};
    EP_RETURN_IF_ERROR(ReadBlocks(given, result, call->peers.count, call->gathers, &blocks));
    call->arrays.push_back(blocks);
  }
  return Status();
}

// Ends an exchange that had `status`. After a failure, results are filled as failed kernels fill
// them: NaN in floats and 0 in integers, which are safe as an index or a trip count until the
// failure is reported.
Status Finish(nccl::Communicator& communicator, const NcclCall& call, const Buffer& result,
              const Status& status) {
  const uint8_t filling = LostByte(result.dtype);
  if (status.ok()) {
    return communicator.mark()->Guard(call.stream, result.data, result.bytes(), filling);
  }
  // XLA gets the error at the next run, on every device of the process.
  return cuda::Check(cudaMemsetAsync(result.data, filling, result.bytes(), call.stream),
                     "cudaMemsetAsync");
}

// Moves all arrays in one NCCL group.
Status Exchange(nccl::NcclGroup& group, nccl::Communicator& communicator, const NcclCall& call) {
  const nccl::Peers& peers = call.peers;
  int64_t bytes = 0;
  for (const nccl::Blocks& blocks : call.arrays) {
    bytes += blocks.bytes;
    if (blocks.bytes == 0) continue;
    EP_RETURN_IF_CUDA(cudaMemcpyAsync(blocks.From(peers.self), blocks.For(peers.self), blocks.bytes,
                                      cudaMemcpyDeviceToDevice, call.stream));
  }
  if (bytes == 0 || peers.count == 1) return Status();
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  const Status status = group.Run(communicator, peers, [&](nccl::Comm* comm) {
    return nccl::SendArrays(*api, peers, call.arrays, comm, call.stream);
  });
  for (size_t i = 0; i < call.arrays.size(); ++i) {
    const Buffer& result = call.frame.rets[call.first_result + i];
    EP_RETURN_IF_ERROR(Finish(communicator, call, result, status));
  }
  return Status();
}

// Reads the call and moves its blocks.
using Make = Status (*)(nccl::NcclGroup& group, nccl::Communicator& communicator,
                        const ffi::Dictionary& attrs, NcclCall* call);

Status MoveBlocks(nccl::NcclGroup& group, nccl::Communicator& communicator, const ffi::Dictionary&,
                  NcclCall* call) {
  EP_RETURN_IF_ERROR(CheckArrays(call));
  return Exchange(group, communicator, *call);
}

// ep_nccl_counted_v1(counts s32 [2, P], rows ...; node_size, rail) -> rows ... Sends counts[0, p]
// rows to peer p, and receives counts[1, p] rows from it, as `CountedArrays` explains.
Status MoveRows(nccl::NcclGroup& group, nccl::Communicator& communicator, const ffi::Dictionary&,
                NcclCall* call) {
  const CallFrame& frame = call->frame;
  const nccl::Peers& peers = call->peers;
  EP_RETURN_IF_ERROR(
      frame.CheckCount(frame.rets.size() + 1, std::max<size_t>(frame.rets.size(), 1)));
  const auto [counts_given] = frame.Args("counts");
  const int32_t* on_device = nullptr;
  EP_RETURN_IF_ERROR(counts_given.Read({2, peers.count}, &on_device));
  CountedArrays arrays(peers);
  for (size_t i = 0; i < frame.rets.size(); ++i) {
    EP_RETURN_IF_ERROR(arrays.Add(Operand(frame.call, "rows", frame.args[i + 1]),
                                  Operand(frame.call, "result", frame.rets[i])));
  }
  const nccl::Api* api = nullptr;
  EP_RETURN_IF_ERROR(nccl::Load("", &api));
  std::vector<int32_t> counts(2 * peers.count);
  Status status = group.Ended(ReadCounts(group, frame.call, call->stream, on_device, &counts));
  if (status.ok()) {
    arrays.Take(counts.data());
    EP_RETURN_IF_ERROR(arrays.CopyOwn(call->stream));
    status = group.Run(communicator, peers,
                       [&](nccl::Comm* comm) { return arrays.Send(*api, comm, call->stream); });
  }
  for (const Buffer& ret : frame.rets) {
    EP_RETURN_IF_ERROR(Finish(communicator, *call, ret, status));
  }
  return Status();
}

// Reads the results that are the plan's arrays, in the plan's order.
Status ReadPlan(const CallFrame& frame, int64_t nodes, nccl::NodePlanParams* params) {
  const auto [dst_rank, dst_row, recv_count, staged_start, staged_row, staged_slot, kept,
              group_sizes, num_recv, virtual_rank, virtual_row, chunks] =
      frame.Rets("dst_rank", "dst_row", "recv_count", "staged_start", "staged_row", "staged_slot",
                 "kept", "group_sizes", "num_recv", "virtual_rank", "virtual_row", "chunks");
  const Dims slots = {params->tokens, params->top_k};
  const Dims all = {nodes * params->tokens, params->top_k};
  params->experts = static_cast<int32_t>(kept.dim(0));
  params->capacity = static_cast<int32_t>(staged_row.dim(0));
  EP_RETURN_IF_ERROR(dst_rank.Read(slots, &params->dst_rank));
  EP_RETURN_IF_ERROR(dst_row.Read(slots, &params->dst_row));
  EP_RETURN_IF_ERROR(recv_count.Read({params->node_size, 4}, &params->recv_count));
  EP_RETURN_IF_ERROR(
      staged_start.Read({int64_t{params->ranks} * params->tokens + 1}, &params->staged_start));
  EP_RETURN_IF_ERROR(staged_row.Read({params->capacity}, &params->staged_row));
  EP_RETURN_IF_ERROR(staged_slot.Read({params->capacity}, &params->staged_slot));
  EP_RETURN_IF_ERROR(kept.Read({params->experts}, &params->kept));
  EP_RETURN_IF_ERROR(group_sizes.Read({params->experts}, &params->group_sizes));
  EP_RETURN_IF_ERROR(num_recv.Read({1}, &params->num_recv));
  EP_RETURN_IF_ERROR(virtual_rank.Read(all, &params->virtual_rank));
  EP_RETURN_IF_ERROR(virtual_row.Read(all, &params->virtual_row));
  return chunks.Read({1}, &params->chunks);
}

constexpr size_t kNodePlanArrays = 12;

// ep_nccl_prepare_v1(topk_idx s32 [T, K]; node_size, alignment, row_alignment=alignment)
//   -> the twelve arrays of a node plan, and as scratch s32 [N, T, K] and s32 [scratch] Only the
//   expert indices of all ranks are exchanged. A second operand is not read.
Status Prepare(nccl::NcclGroup& group, nccl::Communicator& communicator,
               const ffi::Dictionary& attrs, NcclCall* call) {
  const CallFrame& frame = call->frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(frame.args.size() == 2 ? 2 : 1, kNodePlanArrays + 2));
  const auto node_size = attrs.get<int64_t>("node_size");
  const auto alignment = attrs.get<int64_t>("alignment");
  if (alignment.has_error()) return InvalidArgument("attributes must hold alignment as int64");
  call->peers = nccl::PeersOf(communicator.place().rank, group.options().ep_size, 0, false);
  const auto [topk_idx] = frame.Args("topk_idx");
  nccl::NodePlanParams params{};
  params.ranks = static_cast<int32_t>(call->peers.count);
  params.node_size = static_cast<int32_t>(*node_size);
  params.me = static_cast<int32_t>(call->peers.self);
  params.tokens = static_cast<int32_t>(topk_idx.dim(0));
  params.top_k = static_cast<int32_t>(topk_idx.dim(1));
  params.alignment = static_cast<int32_t>(*alignment);
  Attributes attributes{};
  EP_RETURN_IF_ERROR(ReadAttributes(attrs, &attributes));
  params.row_alignment = attributes.row_alignment == 0
                             ? params.alignment
                             : static_cast<int32_t>(attributes.row_alignment);
  if (params.node_size < 1) return InvalidArgument("node_size must be at least 1");
  const int32_t* idx = nullptr;
  EP_RETURN_IF_ERROR(topk_idx.Read({params.tokens, params.top_k}, &idx));
  EP_RETURN_IF_ERROR(ReadPlan(frame, params.ranks / params.node_size, &params));
  const Operand all("ep_nccl_prepare_v1", "all_idx", frame.rets[kNodePlanArrays]);
  const Operand scratch("ep_nccl_prepare_v1", "scratch", frame.rets[kNodePlanArrays + 1]);
  int32_t* gathered = nullptr;
  EP_RETURN_IF_ERROR(all.Read({params.ranks, params.tokens, params.top_k}, &gathered));
  const int64_t words =
      nccl::NodePlanScratch(params.ranks, params.tokens, params.top_k, params.experts);
  EP_RETURN_IF_ERROR(scratch.Read({words}, &params.scratch));
  params.idx = gathered;
  call->arrays = {{reinterpret_cast<const uint8_t*>(idx), reinterpret_cast<uint8_t*>(gathered),
                   int64_t{params.tokens} * params.top_k * 4, /*gathers=*/true}};
  call->first_result = kNodePlanArrays;
  EP_RETURN_IF_ERROR(Exchange(group, communicator, *call));
  return cuda::Check(nccl::LaunchNodePlan(call->stream, params), "ep_nccl_prepare_v1");
}

Status RunInGroup(nccl::NcclGroup& group, uint64_t run, const ffi::Dictionary& attrs, Make make,
                  NcclCall* call) {
  EP_RETURN_IF_ERROR(group.Decide(run));
  const auto node_size = attrs.get<int64_t>("node_size");
  const auto rail = attrs.get<int64_t>("rail");
  if (node_size.has_error() || rail.has_error()) {
    return InvalidArgument("attributes must hold node_size and rail as int64");
  }
  const int64_t ep_size = group.options().ep_size;
  if (*node_size < 0 || (*node_size > 0 && ep_size % *node_size != 0)) {
    return InvalidArgument("node_size must be 0 or divide the ep size " + std::to_string(ep_size) +
                           ", got " + std::to_string(*node_size));
  }
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  nccl::Communicator* communicator = group.OfDevice(device);
  if (communicator == nullptr) return OtherMesh(device, group.options().name);
  call->peers = nccl::PeersOf(communicator->place().rank, ep_size, *node_size, *rail != 0);
  return make(group, *communicator, attrs, call);
}

Status CallNccl(uint64_t run, const ffi::Dictionary& attrs, Make make, NcclCall* call) {
  Attributes attributes{};
  EP_RETURN_IF_ERROR(ReadAttributes(attrs, &attributes));
  nccl::Layer layer;
  std::shared_ptr<nccl::NcclGroup> group;
  EP_RETURN_IF_ERROR(nccl::ThisProcessGroups().Resolve(attributes.layer_id, attributes.fingerprint,
                                                       &layer, &group));
  if (!group->BeginCall()) return group->ClosedError(layer.name);
  const Status status = RunInGroup(*group, run, attrs, make, call);
  group->EndCall();
  return status;
}

struct ExchangeTarget {
  const char* name;
  bool gathers;
  Make make;
};

template <const ExchangeTarget& target>
ffi::Error Execute(cudaStream_t stream, ffi::RunId run, ffi::Dictionary attrs,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  NcclCall call{};
  call.stream = stream;
  call.gathers = target.gathers;
  call.frame.call = target.name;
  return Answer(args, rets, &call.frame, [&] {
    return CallNccl(static_cast<uint64_t>(run.run_id), attrs, target.make, &call);
  });
}

constexpr ExchangeTarget kExchange = {"ep_nccl_exchange_v1", false, MoveBlocks};
constexpr ExchangeTarget kAllGather = {"ep_nccl_all_gather_v1", true, MoveBlocks};
constexpr ExchangeTarget kCounted = {"ep_nccl_counted_v1", false, MoveRows};
constexpr ExchangeTarget kPrepare = {"ep_nccl_prepare_v1", true, Prepare};

#define EP_RUNTIME_NCCL_BINDING                 \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<ffi::RunId>()                        \
      .Attrs()                                  \
      .RemainingArgs()                          \
      .RemainingRets()
XLA_FFI_DEFINE_HANDLER(kExchangeV1, Execute<kExchange>, EP_RUNTIME_NCCL_BINDING);
XLA_FFI_DEFINE_HANDLER(kAllGatherV1, Execute<kAllGather>, EP_RUNTIME_NCCL_BINDING);
XLA_FFI_DEFINE_HANDLER(kCountedV1, Execute<kCounted>, EP_RUNTIME_NCCL_BINDING);
XLA_FFI_DEFINE_HANDLER(kPrepareV1, Execute<kPrepare>, EP_RUNTIME_NCCL_BINDING);

}  // namespace

XLA_FFI_Error* NcclExchangeV1(XLA_FFI_CallFrame* frame) { return kExchangeV1(frame); }
XLA_FFI_Error* NcclAllGatherV1(XLA_FFI_CallFrame* frame) { return kAllGatherV1(frame); }
XLA_FFI_Error* NcclCountedV1(XLA_FFI_CallFrame* frame) { return kCountedV1(frame); }
XLA_FFI_Error* NcclPrepareV1(XLA_FFI_CallFrame* frame) { return kPrepareV1(frame); }

}  // namespace ep_runtime
