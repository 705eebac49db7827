// Defines the custom calls on NVIDIA GPUs. A handler checks operands, finds the group if there is
// one, and launches. It neither allocates nor synchronises, so XLA may record it into a command
// buffer. One call must read its result, so it has a separate target: prepare in groups with
// on_overflow="error".

#include <cuda_runtime.h>

#include <memory>

#include "core/groups/registry.h"
#include "cuda/device/driver.h"
#include "ffi/cuda_call.h"
#include "ffi/gemm/grouped_gemm_ffi_cuda.h"
#include "ffi/nccl/nccl_ffi_cuda.h"
#include "ffi/nvtx_range.h"
#include "ffi/read_call.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "ffi/target.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

using LaunchFn = Status (*)(const CudaCall& call);

struct Launch {
  ffi::RunId run;
  cudaStream_t stream;
  LaunchFn launch_fn;
  CallFrame frame;
  Attributes attributes;
  const int32_t* layer_index;
};

Status LaunchInGroup(const Launch& launch, const LayerEntry& layer,
                     const std::shared_ptr<Group>& group) {
  auto* device_group = static_cast<cuda::CudaGroup*>(group->device());
  const OpCode op = launch.frame.op;
  EP_RETURN_IF_ERROR(
      device_group->Decide(static_cast<uint64_t>(launch.run.run_id), layer.name, op));
  int device = -1;
  EP_RETURN_IF_ERROR(cuda::Check(cudaGetDevice(&device), "cudaGetDevice"));
  const cuda::LocalRank* rank = device_group->OfDevice(device);
  if (rank == nullptr) return OtherMesh(device, group->options().name);
  CallContext context;
  EP_RETURN_IF_ERROR(ReadContext(layer, launch.attributes, &context));
  context.group = group;
  context.op = op;
  context.world_rank = rank->world_rank;
  // The rank operand is on the device, so the host cannot read it. The device's ordinal gives the
  // rank.
  const cuda::CallName name{launch.attributes.layer_id, launch.layer_index,
                            launch.attributes.handle, layer.handle_base + launch.attributes.handle,
                            static_cast<uint32_t>(layer.in_flight)};
  const NvtxRange range(op, layer.name);
  return launch.launch_fn(CudaCall{launch.frame, context, *device_group, *rank, name, launch.stream,
                                   launch.attributes, static_cast<uint64_t>(launch.run.run_id)});
}

Status LaunchCall(const ffi::Dictionary& attrs, Launch& launch) {
  EP_RETURN_IF_ERROR(ReadAttributes(attrs, &launch.attributes));
  if (launch.frame.args.size() < 2) return InvalidArgument("layer_index operand is missing");
  const auto [rank, layer_index] = launch.frame.Args("rank", "layer_index");
  EP_RETURN_IF_ERROR(layer_index.Read({1}, &launch.layer_index));
  LayerEntry layer;
  std::shared_ptr<Group> group;
  // For a stack this resolves layer 0: all layers have the same settings, and only the device knows
  // the layer's index.
  EP_RETURN_IF_ERROR(ThisProcess().registry.Resolve(launch.attributes.layer_id,
                                                    launch.attributes.fingerprint, &layer, &group));
  if (!group->BeginCall()) return group->ClosedError(layer.name);
  group->TellTime();
  Status status = LaunchInGroup(launch, layer, group);
  if (!status.ok()) group->RecordError(status.text());
  group->EndCall();
  return status;
}

template <OpCode op, LaunchFn launch_fn>
ffi::Error Execute(cudaStream_t stream, ffi::RunId run, ffi::Dictionary attrs,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Launch launch{run, stream, launch_fn, {OpName(op), op, {}, {}}, {}, nullptr};
  return Answer(args, rets, &launch.frame, [&] { return LaunchCall(attrs, launch); });
}

#define EP_RUNTIME_BINDING                      \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<ffi::RunId>()                        \
      .Attrs()                                  \
      .RemainingArgs()                          \
      .RemainingRets()
#define EP_RUNTIME_CUDA_TARGET(symbol, op, launch_fn)                          \
  XLA_FFI_DEFINE_HANDLER(symbol, (Execute<op, launch_fn>), EP_RUNTIME_BINDING, \
                         {ffi::Traits::kCmdBufferCompatible})

EP_RUNTIME_CUDA_TARGET(kPrepareV1, OpCode::kPrepare, LaunchPrepareCall);
EP_RUNTIME_CUDA_TARGET(kDispatchV1, OpCode::kDispatch, LaunchDispatchCall);
EP_RUNTIME_CUDA_TARGET(kCombineV1, OpCode::kCombine, LaunchCombineCall);
EP_RUNTIME_CUDA_TARGET(kDispatchBwdV1, OpCode::kDispatchBwd, LaunchDispatchBwdCall);
EP_RUNTIME_CUDA_TARGET(kCombineBwdV1, OpCode::kCombineBwd, LaunchCombineBwdCall);
EP_RUNTIME_CUDA_TARGET(kPushCopiesV1, OpCode::kCopies, LaunchPushCopiesCall);
EP_RUNTIME_CUDA_TARGET(kReturnCopiesV1, OpCode::kCopies, LaunchReturnCopiesCall);
EP_RUNTIME_CUDA_TARGET(kBlockV1, OpCode::kBlock, LaunchBlockCall);
EP_RUNTIME_CUDA_TARGET(kBlockBwdV1, OpCode::kBlockBwd, LaunchBlockBwdCall);
XLA_FFI_DEFINE_HANDLER(kPrepareSyncV1, (Execute<OpCode::kPrepare, LaunchPrepareCall>),
                       EP_RUNTIME_BINDING);
// NCCL's kernels cannot be recorded; nccl_ffi_cuda.cc explains why.
#define EP_RUNTIME_RAIL_TARGET(symbol, op, launch_fn) \
  XLA_FFI_DEFINE_HANDLER(symbol, (Execute<op, launch_fn>), EP_RUNTIME_BINDING)
EP_RUNTIME_RAIL_TARGET(kRailDispatchV1, OpCode::kDispatch, LaunchRailDispatchCall);
EP_RUNTIME_RAIL_TARGET(kRailCombineV1, OpCode::kCombine, LaunchRailCombineCall);
EP_RUNTIME_RAIL_TARGET(kRailDispatchBwdV1, OpCode::kDispatchBwd, LaunchRailDispatchBwdCall);
EP_RUNTIME_RAIL_TARGET(kRailCombineBwdV1, OpCode::kCombineBwd, LaunchRailCombineBwdCall);
EP_RUNTIME_RAIL_TARGET(kRailBlockV1, OpCode::kBlock, LaunchRailBlockCall);
EP_RUNTIME_RAIL_TARGET(kRailBlockBwdV1, OpCode::kBlockBwd, LaunchRailBlockBwdCall);
EP_RUNTIME_CUDA_TARGET(kDispatchCeilingV1, OpCode::kDispatch, LaunchCeilingCall);
EP_RUNTIME_CUDA_TARGET(kCombineCeilingV1, OpCode::kCombine, LaunchCeilingCall);

}  // namespace

const Target kTargets[] = {
    {"ep_prepare_v1", nullptr, kPrepareV1},
    {"ep_prepare_sync_v1", nullptr, kPrepareSyncV1},
    {"ep_dispatch_v1", nullptr, kDispatchV1},
    {"ep_combine_v1", nullptr, kCombineV1},
    {"ep_dispatch_bwd_v1", nullptr, kDispatchBwdV1},
    {"ep_combine_bwd_v1", nullptr, kCombineBwdV1},
    {"ep_push_copies_v1", nullptr, kPushCopiesV1},
    {"ep_return_copies_v1", nullptr, kReturnCopiesV1},
    {"ep_block_v1", nullptr, kBlockV1},
    {"ep_block_bwd_v1", nullptr, kBlockBwdV1},
    {"ep_dispatch_ceiling_v1", nullptr, kDispatchCeilingV1},
    {"ep_combine_ceiling_v1", nullptr, kCombineCeilingV1},
    {"ep_clock_v1", nullptr, kClockV1},
    {"ep_grouped_gemm_v1", nullptr, kGroupedGemmV1},
    {"ep_grouped_gemm_dw_v1", nullptr, kGroupedGemmDwV1},
    {"ep_fp8_grouped_gemm_v1", nullptr, kFp8GroupedGemmV1},
    {"ep_fp8_grouped_gemm_dw_v1", nullptr, kFp8GroupedGemmDwV1},
    {"ep_tf32_grouped_gemm_dw_v1", nullptr, kTf32GroupedGemmDwV1},
    {"ep_transpose_rows_v1", nullptr, kTransposeRowsV1},
    {"ep_transpose_weights_v1", nullptr, kTransposeWeightsV1},
    {"ep_requantize_rows_v1", nullptr, kRequantizeRowsV1},
    {"ep_dequantize_v1", nullptr, kDequantizeV1},
    {"ep_activation_v1", nullptr, kActivationV1},
    {"ep_activation_bwd_v1", nullptr, kActivationBwdV1},
    {"ep_activation_amax_v1", nullptr, kActivationAmaxV1},
    {"ep_quantize_activation_v1", nullptr, kQuantizeActivationV1},
    {"ep_group_amax_v1", nullptr, kGroupAmaxV1},
    {"ep_scale_rows_v1", nullptr, kScaleRowsV1},
    {"ep_quantize_tiles_v1", nullptr, kQuantizeTilesV1},
    {"ep_quantize_blocks_v1", nullptr, kQuantizeBlocksV1},
    {"ep_quantize_weights_v1", nullptr, kQuantizeWeightsV1},
    {"ep_quantize_mx_v1", nullptr, kQuantizeMxV1},
    {"ep_gather_rows_v1", nullptr, kGatherRowsV1},
    {"ep_spread_rows_v1", nullptr, kSpreadRowsV1},
    {"ep_sum_rows_v1", nullptr, kSumRowsV1},
    {"ep_sum_scaled_rows_v1", nullptr, kSumScaledRowsV1},
    {"ep_group_sums_v1", nullptr, kGroupSumsV1},
    {"ep_nccl_exchange_v1", nullptr, NcclExchangeV1},
    {"ep_nccl_all_gather_v1", nullptr, NcclAllGatherV1},
    {"ep_nccl_counted_v1", nullptr, NcclCountedV1},
    {"ep_nccl_prepare_v1", nullptr, NcclPrepareV1},
    {"ep_nccl_dispatch_v1", nullptr, kRailDispatchV1},
    {"ep_nccl_combine_v1", nullptr, kRailCombineV1},
    {"ep_nccl_dispatch_bwd_v1", nullptr, kRailDispatchBwdV1},
    {"ep_nccl_combine_bwd_v1", nullptr, kRailCombineBwdV1},
    {"ep_nccl_block_v1", nullptr, kRailBlockV1},
    {"ep_nccl_block_bwd_v1", nullptr, kRailBlockBwdV1},
};
const size_t kNumTargets = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace ep_runtime
