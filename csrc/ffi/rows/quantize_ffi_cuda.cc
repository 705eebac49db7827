// XLA targets of quantization. 8-bit floats and 8-bit scales are passed as u8.

#include <cstdint>
#include <string>

#include "cuda/rows/quantize.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

int64_t Tiles(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

Status ReadFormat(const CallFrame& frame, int64_t number, cuda::Fp8Format* format) {
  *format = static_cast<cuda::Fp8Format>(number);
  if (number == 0 || number == 1) return Status();
  return Refused(frame.call, "format", "format must be 0 or 1, got " + std::to_string(number));
}

// Reads values [S * C, W] and group_sizes s32 [S, L], or [S, 0] for slabs that are one group.
template <typename Params>
Status ReadValues(const Operand& group_sizes, const Operand& values, Params* params) {
  EP_RETURN_IF_ERROR(ReadRowGroups(group_sizes, values, &params->groups));
  EP_RETURN_IF_ERROR(values.ReadFloatType(&params->type));
  params->width = static_cast<int32_t>(values.dim(1));
  params->values = values.data();
  return Status();
}

// Reads values [G, K', m, N'] to quantize in blocks. `blocks` is the shape of their scales.
template <typename Params>
Status ReadMatrices(const CallFrame& frame, const Operand& values, int64_t format, Params* params,
                    Dims* blocks) {
  const Dims dims = {values.dim(0), values.dim(1), values.dim(2), values.dim(3)};
  EP_RETURN_IF_ERROR(values.ReadFloatType(&params->type));
  EP_RETURN_IF_ERROR(ReadFormat(frame, format, &params->format));
  EP_RETURN_IF_ERROR(values.Read(values.type(), dims, &params->values));
  params->count = static_cast<int32_t>(dims[0]);
  params->rows = static_cast<int32_t>(dims[1]);
  params->middle = static_cast<int32_t>(dims[2]);
  params->width = static_cast<int32_t>(dims[3]);
  *blocks = {dims[0], Tiles(dims[1], cuda::kTile), dims[2], Tiles(dims[3], cuda::kTile)};
  return Status();
}

// ep_group_amax_v1(group_sizes, values) -> f32 [G]
Status LaunchAmax(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(2, 1));
  const auto [group_sizes, values] = frame.Args("group_sizes", "values");
  const auto [amax] = frame.Rets("amax");
  cuda::AmaxParams params{};
  EP_RETURN_IF_ERROR(ReadValues(group_sizes, values, &params));
  EP_RETURN_IF_ERROR(amax.Read({amax.dim(0)}, &params.amax));
  params.num_experts = static_cast<int32_t>(amax.dim(0));
  return cuda::Check(cuda::LaunchGroupAmax(stream, params), frame.call);
}

// ep_scale_rows_v1(group_sizes, values, scale f32 [S * L]) -> data u8 [S * C, W]
Status LaunchScaleRows(const CallFrame& frame, cudaStream_t stream, int64_t format,
                       int64_t /*power_of_two*/, int64_t clear_slack) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 1));
  const auto [group_sizes, values, scale] = frame.Args("group_sizes", "values", "scale");
  const auto [data] = frame.Rets("data");
  cuda::QuantizeRowsParams params{};
  EP_RETURN_IF_ERROR(ReadValues(group_sizes, values, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, format, &params.format));
  const int64_t groups = int64_t{params.groups.num_slabs} * params.groups.groups_per_slab;
  EP_RETURN_IF_ERROR(scale.Read({groups}, &params.group_scale));
  EP_RETURN_IF_ERROR(data.Read(values.dims(), &params.data));
  params.clear_slack = clear_slack != 0;
  return cuda::Check(cuda::LaunchQuantizeRows(stream, params), frame.call);
}

// ep_quantize_tiles_v1(group_sizes, values) -> data u8 [S * C, W], f32 [S * C, ceil(W / 128)]
//   or packed, with clear_slack=0: u8 [S * C, W + 4 * ceil(W / 128)], each row's scales after its
//   data
Status LaunchTiles(const CallFrame& frame, cudaStream_t stream, int64_t format,
                   int64_t power_of_two, int64_t clear_slack) {
  const bool packed = frame.rets.size() == 1;
  EP_RETURN_IF_ERROR(frame.CheckCount(2, packed ? 1 : 2));
  const auto [group_sizes, values] = frame.Args("group_sizes", "values");
  const auto [data] = frame.Rets("data");
  const int64_t rows = values.dim(0), width = values.dim(1), tiles = Tiles(width, cuda::kTile);
  cuda::QuantizeRowsParams params{};
  EP_RETURN_IF_ERROR(ReadValues(group_sizes, values, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, format, &params.format));
  EP_RETURN_IF_ERROR(data.Read({rows, packed ? width + 4 * tiles : width}, &params.data));
  if (!packed) {
    const Operand scale(frame.call, "scale", frame.rets[1]);
    EP_RETURN_IF_ERROR(scale.Read({rows, tiles}, &params.tile_scale));
  }
  params.packed = packed;
  params.power_of_two = power_of_two != 0;
  params.clear_slack = clear_slack != 0;
  return cuda::Check(cuda::LaunchQuantizeRows(stream, params), frame.call);
}

// ep_quantize_blocks_v1(values [G, K', m, N']) -> data u8 like values,
//                                                 f32 [G, ceil(K' / 128), m, ceil(N' / 128)]
Status LaunchBlocks(const CallFrame& frame, cudaStream_t stream, int64_t format,
                    int64_t power_of_two, int64_t /*clear_slack*/) {
  EP_RETURN_IF_ERROR(frame.CheckCount(1, 2));
  const auto [values] = frame.Args("values");
  const auto [data, scale] = frame.Rets("data", "scale");
  cuda::QuantizeWeightsParams params{};
  Dims blocks;
  EP_RETURN_IF_ERROR(ReadMatrices(frame, values, format, &params, &blocks));
  EP_RETURN_IF_ERROR(data.Read(values.dims(), &params.data));
  EP_RETURN_IF_ERROR(scale.Read(blocks, &params.scale));
  params.power_of_two = power_of_two != 0;
  return cuda::Check(cuda::LaunchQuantizeWeights(stream, params), frame.call);
}

// ep_quantize_weights_v1(values [G, K', m, N'], scale f32 [G] or [0]) -> data u8 like values,
//   u8 [G, m, N', K'], f32 [G, ceil(K' / 128), m, ceil(N' / 128)] or [0]
Status LaunchWeights(const CallFrame& frame, cudaStream_t stream, int64_t format,
                     int64_t power_of_two, int64_t /*clear_slack*/) {
  EP_RETURN_IF_ERROR(frame.CheckCount(2, 3));
  const auto [values, given] = frame.Args("values", "given scale");
  const auto [data, transposed, scale] = frame.Rets("data", "transposed", "scale");
  cuda::QuantizeWeightsParams params{};
  Dims blocks;
  EP_RETURN_IF_ERROR(ReadMatrices(frame, values, format, &params, &blocks));
  const Dims& dims = values.dims();
  const bool makes = given.absent(1);
  EP_RETURN_IF_ERROR(given.ReadIf(!makes, {dims[0]}, &params.given_scale));
  EP_RETURN_IF_ERROR(data.Read(dims, &params.data));
  EP_RETURN_IF_ERROR(transposed.Read({dims[0], dims[2], dims[3], dims[1]}, &params.transposed));
  EP_RETURN_IF_ERROR(scale.Read(makes ? blocks : Dims{0}, &params.scale));
  if (!makes) params.scale = nullptr;
  params.power_of_two = power_of_two != 0;
  return cuda::Check(cuda::LaunchQuantizeWeights(stream, params), frame.call);
}

// ep_quantize_mx_v1(group_sizes, values) -> data u8 [S * C, W], e8m0 u8 [S * C, W / 32],
//                                           data u8 [S * C, W], e8m0 u8 [S * C / 32, W]
Status LaunchMx(const CallFrame& frame, cudaStream_t stream, int64_t format,
                int64_t /*power_of_two*/, int64_t clear_slack) {
  EP_RETURN_IF_ERROR(frame.CheckCount(2, 4));
  const auto [group_sizes, values] = frame.Args("group_sizes", "values");
  const auto [data, scale, data_columns, scale_columns] =
      frame.Rets("data", "scale", "data_columns", "scale_columns");
  cuda::QuantizeMxParams params{};
  EP_RETURN_IF_ERROR(ReadValues(group_sizes, values, &params));
  EP_RETURN_IF_ERROR(ReadFormat(frame, format, &params.format));
  const int64_t rows = values.dim(0), width = values.dim(1);
  EP_RETURN_IF_ERROR(data.Read(values.dims(), &params.data));
  EP_RETURN_IF_ERROR(scale.Read({rows, width / cuda::kMxTile}, &params.scale));
  EP_RETURN_IF_ERROR(data_columns.Read(values.dims(), &params.data_columns));
  EP_RETURN_IF_ERROR(scale_columns.Read({rows / cuda::kMxTile, width}, &params.scale_columns));
  params.clear_slack = clear_slack != 0;
  return cuda::Check(cuda::LaunchQuantizeMx(stream, params), frame.call);
}

}  // namespace

#define EP_RUNTIME_QUANTIZE(symbol, call, launch) \
  EP_RUNTIME_STREAM_CALL(                         \
      symbol, call, launch,                       \
      .Attr<int64_t>("format").Attr<int64_t>("power_of_two").Attr<int64_t>("clear_slack"))

EP_RUNTIME_STREAM_CALL(kGroupAmaxV1, "ep_group_amax_v1", LaunchAmax);
EP_RUNTIME_QUANTIZE(kScaleRowsV1, "ep_scale_rows_v1", LaunchScaleRows);
EP_RUNTIME_QUANTIZE(kQuantizeTilesV1, "ep_quantize_tiles_v1", LaunchTiles);
EP_RUNTIME_QUANTIZE(kQuantizeBlocksV1, "ep_quantize_blocks_v1", LaunchBlocks);
EP_RUNTIME_QUANTIZE(kQuantizeWeightsV1, "ep_quantize_weights_v1", LaunchWeights);
EP_RUNTIME_QUANTIZE(kQuantizeMxV1, "ep_quantize_mx_v1", LaunchMx);

}  // namespace ep_runtime
