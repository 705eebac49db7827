// Defines the custom calls on CPU.
#include <memory>
#include <string>
#include <utility>

#include "core/base/layer_index.h"
#include "core/groups/registry.h"
#include "core/runs/runs.h"
#include "ffi/cpu_call.h"
#include "ffi/read_call.h"
#include "ffi/site.h"
#include "ffi/target.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

using OpFn = Status (*)(const CallFrame& frame, CallContext context);

struct Pending {
  CallFrame frame;
  Attributes attributes;
  std::shared_ptr<Site> site;
  Site::Turn turn;
  uint64_t run;
  OpFn op_fn;
  ffi::Promise promise;
};

Status ReadScalar(const CallFrame& frame, size_t index, const char* name, int64_t* out) {
  if (frame.args.size() <= index) return InvalidArgument(std::string(name) + " operand is missing");
  const int32_t* value = nullptr;
  EP_RETURN_IF_ERROR(Operand(frame.call, name, frame.args[index]).Read({1}, &value));
  *out = *value;
  return Status();
}

Status RunInGroup(const Pending& pending, const LayerEntry& layer,
                  const std::shared_ptr<Group>& group, int64_t world_rank, bool again) {
  EP_RETURN_IF_ERROR(group->AtStart(pending.run, layer.name, pending.frame.op));
  if (world_rank < 0 || world_rank >= group->sizes().world_size) {
    return InvalidArgument("rank must be in [0, " + std::to_string(group->sizes().world_size) +
                           "), got " + std::to_string(world_rank))
        .With("rank", world_rank);
  }
  if (!group->IsLocal(world_rank)) {
    return InvalidArgument("rank " + std::to_string(world_rank) +
                           " is driven by another process; group " + group->options().name +
                           " was made with another mesh")
        .With("rank", world_rank);
  }
  CallContext context;
  EP_RETURN_IF_ERROR(ReadContext(layer, pending.attributes, &context));
  context.group = group;
  context.op = pending.frame.op;
  context.world_rank = world_rank;
  context.run = pending.run;
  context.counts = !again;
  if (group->several_processes()) {
    context.key = pending.site->KeyEverywhere(pending.turn);
    context.site = pending.site->Named(pending.turn);
  } else {
    context.key = pending.site->KeyHere(pending.run, pending.turn);
  }
  return pending.op_fn(pending.frame, std::move(context));
}

Status RunCall(const Pending& pending) {
  int64_t world_rank;
  int64_t layer_index;
  EP_RETURN_IF_ERROR(ReadScalar(pending.frame, 0, "rank", &world_rank));
  EP_RETURN_IF_ERROR(ReadScalar(pending.frame, 1, "layer_index", &layer_index));
  const LayerIndex index = ReadLayerIndex(static_cast<int32_t>(layer_index));
  LayerEntry layer;
  std::shared_ptr<Group> group;
  EP_RETURN_IF_ERROR(ThisProcess().registry.Resolve(
      pending.attributes.layer_id + static_cast<uint64_t>(index.layer),
      pending.attributes.fingerprint, &layer, &group));
  if (!group->BeginCall()) {
    Status closed = group->ClosedError(layer.name);
    group->FailRun(pending.run, closed);
    return closed;
  }
  Status status = RunInGroup(pending, layer, group, world_rank, index.again);
  if (!status.ok()) group->FailRun(pending.run, status);
  // A run that has begun continues, with NaN: its other devices cannot be stopped, and may wait in
  // an XLA collective for this one.
  if (!status.ok() && group->Poisoned() &&
      group->AtStart(pending.run, layer.name, pending.frame.op).ok()) {
    FillLost(pending.frame);
    status = Status();
  }
  group->EndCall();
  return status;
}

// Runs on a call thread. Completing the promise runs the rest of the device's program on this
// thread, so do that last, with no lock or call held.
void Finish(std::unique_ptr<Pending> pending) {
  const Status status = RunCall(*pending);
  if (!status.ok()) ThisProcessRuns().failed_runs.Add(pending->run, status);
  ffi::Promise promise = std::move(pending->promise);
  pending.reset();
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToXla(status));
  }
}

template <OpCode op, OpFn op_fn>
ffi::Future Execute(ffi::RunId run, int32_t device, SiteState* state, ffi::Dictionary attrs,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto pending = std::make_unique<Pending>();
  ffi::Future future(pending->promise);
  pending->frame.call = OpName(op);
  pending->frame.op = op;
  pending->site = state->site;
  pending->run = static_cast<uint64_t>(run.run_id);
  pending->turn = state->site->Next(pending->run, device);
  pending->op_fn = op_fn;
  Status status = ReadFrame(args, rets, &pending->frame);
  if (status.ok()) status = ReadAttributes(attrs, &pending->attributes);
  if (!status.ok()) {
    ThisProcessRuns().failed_runs.Add(pending->run, status);
    pending->promise.SetError(ToXla(status));
    return future;
  }
  ThisProcess().threads.Run([raw = pending.release()] { Finish(std::unique_ptr<Pending>(raw)); });
  return future;
}

template <OpCode op>
ffi::ErrorOr<std::unique_ptr<SiteState>> Instantiate(ffi::Dictionary attrs) {
  Attributes attributes;
  const Status status = ReadAttributes(attrs, &attributes);
  if (!status.ok()) return ffi::Unexpected(ToXla(status));
  const SiteKind kind{op, attributes.layer_id, attributes.fingerprint, attributes.handle};
  return std::make_unique<SiteState>(SiteState{std::make_shared<Site>(kind)});
}

#define EP_RUNTIME_TARGET(symbol, op, op_fn)                   \
  XLA_FFI_DEFINE_HANDLER(symbol##Instantiate, Instantiate<op>, \
                         ffi::Ffi::BindInstantiate().Attrs()); \
  XLA_FFI_DEFINE_HANDLER(symbol, (Execute<op, op_fn>),         \
                         ffi::Ffi::Bind()                      \
                             .Ctx<ffi::RunId>()                \
                             .Ctx<ffi::DeviceOrdinal>()        \
                             .Ctx<ffi::State<SiteState>>()     \
                             .Attrs()                          \
                             .RemainingArgs()                  \
                             .RemainingRets())

EP_RUNTIME_TARGET(kPrepareV1, OpCode::kPrepare, CallPrepare);
EP_RUNTIME_TARGET(kDispatchV1, OpCode::kDispatch, CallDispatch);
EP_RUNTIME_TARGET(kCombineV1, OpCode::kCombine, CallCombine);
EP_RUNTIME_TARGET(kDispatchBwdV1, OpCode::kDispatchBwd, CallDispatchBwd);
EP_RUNTIME_TARGET(kCombineBwdV1, OpCode::kCombineBwd, CallCombineBwd);

}  // namespace

const Target kTargets[] = {
    {"ep_prepare_v1", kPrepareV1Instantiate, kPrepareV1},
    {"ep_dispatch_v1", kDispatchV1Instantiate, kDispatchV1},
    {"ep_combine_v1", kCombineV1Instantiate, kCombineV1},
    {"ep_dispatch_bwd_v1", kDispatchBwdV1Instantiate, kDispatchBwdV1},
    {"ep_combine_bwd_v1", kCombineBwdV1Instantiate, kCombineBwdV1},
};
const size_t kNumTargets = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace ep_runtime
