#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/rows/quantize.h"
#include "ffi/read_call.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

// 8-bit floats and scales of 8 bits travel as u8.
struct QuantizeAttributes {
  int64_t format;  // cuda::Fp8Format
  int64_t power_of_two;
  int64_t clear_slack;
};

int64_t Tiles(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

Status ReadFormat(const CallFrame& frame, int64_t number, cuda::Fp8Format* format) {
  if (number != 0 && number != 1) {
    return InvalidArgument(std::string(frame.call) + ": format must be 0 or 1, got " +
                           std::to_string(number))
        .With("argument", std::string("format"));
  }
  *format = static_cast<cuda::Fp8Format>(number);
  return Status();
}

// values [S * C, W], group_sizes s32 [S, L] or [S, 0]: slabs that are one group.
template <typename Params>
Status ReadValues(const CallFrame& frame, Params* params) {
  const Buffer& values = frame.args[1];
  EP_RETURN_IF_ERROR(ReadRowGroups(frame, frame.args[0], "values", values, &params->groups));
  EP_RETURN_IF_ERROR(ReadFloatRows(frame, "values", values, &params->type));
  params->width = static_cast<int32_t>(values.dim(1));
  params->values = values.data;
  return Status();
}

// values [G, K', m, N'], quantized in blocks. `blocks` is the shape of their scales.
template <typename Params>
Status ReadMatrices(const CallFrame& frame, const QuantizeAttributes& attributes, Params* params,
                    Dims* blocks) {
  const Buffer& values = frame.args[0];
  const Dims dims = {values.dim(0), values.dim(1), values.dim(2), values.dim(3)};
  EP_RETURN_IF_ERROR(ReadFloatRows(frame, "values", values, &params->type));
  EP_RETURN_IF_ERROR(ReadFormat(frame, attributes.format, &params->format));
  EP_RETURN_IF_ERROR(CheckShape(frame, "values", values, dims));
  params->count = static_cast<int32_t>(dims[0]);
  params->rows = static_cast<int32_t>(dims[1]);
  params->middle = static_cast<int32_t>(dims[2]);
  params->width = static_cast<int32_t>(dims[3]);
  params->values = values.data;
  params->power_of_two = attributes.power_of_two != 0;
  *blocks = {dims[0], Tiles(dims[1], cuda::kTile), dims[2], Tiles(dims[3], cuda::kTile)};
  return Status();
}

// ep_group_amax_v1(group_sizes, values) -> f32 [G]
Status LaunchAmax(CallFrame frame, cudaStream_t stream) {
  frame.call = "ep_group_amax_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 2, 1));
  cuda::AmaxParams params{};
  EP_RETURN_IF_ERROR(ReadValues(frame, &params));
  const Buffer& amax = frame.rets[0];
  EP_RETURN_IF_ERROR(CheckArray(frame, "amax", amax, DataType::F32, {amax.dim(0)}));
  params.num_experts = static_cast<int32_t>(amax.dim(0));
  params.amax = static_cast<float*>(amax.data);
  return cuda::Check(cuda::LaunchGroupAmax(stream, params), frame.call);
}

// ep_scale_rows_v1(group_sizes, values, scale f32 [S * L]) -> data u8 [S * C, W]
Status LaunchScaleRows(CallFrame frame, cudaStream_t stream, const QuantizeAttributes& attributes) {
  frame.call = "ep_scale_rows_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  cuda::QuantizeRowsParams params{};
  EP_RETURN_IF_ERROR(ReadValues(frame, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, attributes.format, &params.format));
  const Buffer& scale = frame.args[2];
  const int64_t groups =
      static_cast<int64_t>(params.groups.num_slabs) * params.groups.groups_per_slab;
  EP_RETURN_IF_ERROR(CheckArray(frame, "scale", scale, DataType::F32, {groups}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "data", frame.rets[0], DataType::U8, frame.args[1].dims));
  params.group_scale = static_cast<const float*>(scale.data);
  params.clear_slack = attributes.clear_slack != 0;
  params.data = static_cast<uint8_t*>(frame.rets[0].data);
  return cuda::Check(cuda::LaunchQuantizeRows(stream, params), frame.call);
}

// ep_quantize_tiles_v1(group_sizes, values) -> data u8 [S * C, W], f32 [S * C, ceil(W / 128)]
Status LaunchTiles(CallFrame frame, cudaStream_t stream, const QuantizeAttributes& attributes) {
  frame.call = "ep_quantize_tiles_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 2, 2));
  cuda::QuantizeRowsParams params{};
  EP_RETURN_IF_ERROR(ReadValues(frame, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, attributes.format, &params.format));
  const Buffer& values = frame.args[1];
  const Dims scales = {values.dim(0), Tiles(values.dim(1), cuda::kTile)};
  EP_RETURN_IF_ERROR(CheckArray(frame, "data", frame.rets[0], DataType::U8, values.dims));
  EP_RETURN_IF_ERROR(CheckArray(frame, "scale", frame.rets[1], DataType::F32, scales));
  params.power_of_two = attributes.power_of_two != 0;
  params.clear_slack = attributes.clear_slack != 0;
  params.data = static_cast<uint8_t*>(frame.rets[0].data);
  params.tile_scale = static_cast<float*>(frame.rets[1].data);
  return cuda::Check(cuda::LaunchQuantizeRows(stream, params), frame.call);
}

// ep_quantize_blocks_v1(values [G, K', m, N']) -> data u8 like values,
//                                                 f32 [G, ceil(K' / 128), m, ceil(N' / 128)]
Status LaunchBlocks(CallFrame frame, cudaStream_t stream, const QuantizeAttributes& attributes) {
  frame.call = "ep_quantize_blocks_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 1, 2));
  cuda::QuantizeBlocksParams params{};
  Dims blocks;
  EP_RETURN_IF_ERROR(ReadMatrices(frame, attributes, &params, &blocks));
  EP_RETURN_IF_ERROR(CheckArray(frame, "data", frame.rets[0], DataType::U8, frame.args[0].dims));
  EP_RETURN_IF_ERROR(CheckArray(frame, "scale", frame.rets[1], DataType::F32, blocks));
  params.data = static_cast<uint8_t*>(frame.rets[0].data);
  params.scale = static_cast<float*>(frame.rets[1].data);
  return cuda::Check(cuda::LaunchQuantizeBlocks(stream, params), frame.call);
}

// ep_quantize_weights_v1(values [G, K', m, N'], scale f32 [G] or [0]) -> data u8 like values,
//   u8 [G, m, N', K'], f32 [G, ceil(K' / 128), m, ceil(N' / 128)] or [0]
Status LaunchWeights(CallFrame frame, cudaStream_t stream, const QuantizeAttributes& attributes) {
  frame.call = "ep_quantize_weights_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 2, 3));
  cuda::QuantizeWeightsParams params{};
  Dims blocks;
  EP_RETURN_IF_ERROR(ReadMatrices(frame, attributes, &params, &blocks));
  const Dims& dims = frame.args[0].dims;
  const Buffer& given = frame.args[1];
  const bool makes = given.dims == Dims{0};
  EP_RETURN_IF_ERROR(CheckArray(frame, "given scale", given, DataType::F32, {makes ? 0 : dims[0]}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "data", frame.rets[0], DataType::U8, dims));
  EP_RETURN_IF_ERROR(CheckArray(frame, "transposed", frame.rets[1], DataType::U8,
                                {dims[0], dims[2], dims[3], dims[1]}));
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "scale", frame.rets[2], DataType::F32, makes ? blocks : Dims{0}));
  params.given_scale = makes ? nullptr : static_cast<const float*>(given.data);
  params.data = static_cast<uint8_t*>(frame.rets[0].data);
  params.transposed = static_cast<uint8_t*>(frame.rets[1].data);
  params.scale = makes ? static_cast<float*>(frame.rets[2].data) : nullptr;
  return cuda::Check(cuda::LaunchQuantizeWeights(stream, params), frame.call);
}

// ep_quantize_mx_v1(group_sizes, values) -> data u8 [S * C, W], e8m0 u8 [S * C, W / 32],
//                                           data u8 [S * C, W], e8m0 u8 [S * C / 32, W]
Status LaunchMx(CallFrame frame, cudaStream_t stream, const QuantizeAttributes& attributes) {
  frame.call = "ep_quantize_mx_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 2, 4));
  cuda::QuantizeMxParams params{};
  EP_RETURN_IF_ERROR(ReadValues(frame, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, attributes.format, &params.format));
  const Buffer& values = frame.args[1];
  const int64_t rows = values.dim(0), width = values.dim(1);
  const Dims wanted[] = {
      values.dims, {rows, width / cuda::kMxTile}, values.dims, {rows / cuda::kMxTile, width}};
  const char* const names[] = {"data", "scale", "data_columns", "scale_columns"};
  uint8_t** const results[] = {&params.data, &params.scale, &params.data_columns,
                               &params.scale_columns};
  for (size_t i = 0; i < 4; ++i) {
    EP_RETURN_IF_ERROR(CheckArray(frame, names[i], frame.rets[i], DataType::U8, wanted[i]));
    *results[i] = static_cast<uint8_t*>(frame.rets[i].data);
  }
  params.clear_slack = attributes.clear_slack != 0;
  return cuda::Check(cuda::LaunchQuantizeMx(stream, params), frame.call);
}

ffi::Error RunAmax(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) { return LaunchAmax(std::move(frame), stream); });
}

template <Status (*launch)(CallFrame, cudaStream_t, const QuantizeAttributes&)>
ffi::Error Run(cudaStream_t stream, int64_t format, int64_t power_of_two, int64_t clear_slack,
               ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) {
    return launch(std::move(frame), stream, {format, power_of_two, clear_slack});
  });
}

#define EP_RUNTIME_QUANTIZE(symbol, launch)                            \
  XLA_FFI_DEFINE_HANDLER(symbol, Run<launch>,                          \
                         ffi::Ffi::Bind()                              \
                             .Ctx<ffi::PlatformStream<cudaStream_t>>() \
                             .Attr<int64_t>("format")                  \
                             .Attr<int64_t>("power_of_two")            \
                             .Attr<int64_t>("clear_slack")             \
                             .RemainingArgs()                          \
                             .RemainingRets(),                         \
                         {ffi::Traits::kCmdBufferCompatible})

XLA_FFI_DEFINE_HANDLER(
    kAmax, RunAmax,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
EP_RUNTIME_QUANTIZE(kScaleRows, LaunchScaleRows);
EP_RUNTIME_QUANTIZE(kTiles, LaunchTiles);
EP_RUNTIME_QUANTIZE(kBlocks, LaunchBlocks);
EP_RUNTIME_QUANTIZE(kWeights, LaunchWeights);
EP_RUNTIME_QUANTIZE(kMx, LaunchMx);

}  // namespace

XLA_FFI_Handler* const kGroupAmaxV1 = kAmax;
XLA_FFI_Handler* const kScaleRowsV1 = kScaleRows;
XLA_FFI_Handler* const kQuantizeTilesV1 = kTiles;
XLA_FFI_Handler* const kQuantizeBlocksV1 = kBlocks;
XLA_FFI_Handler* const kQuantizeWeightsV1 = kWeights;
XLA_FFI_Handler* const kQuantizeMxV1 = kMx;

}  // namespace ep_runtime
