// XLA targets that gather, spread and sum rows.
#include <cstdint>

#include "cuda/rows/move_rows.h"
#include "cuda/rows/quantize.h"
#include "cuda/rows/scaled_sums.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

// Reads operands of calls that move tokens to rows.
struct TokenRows {
  Operand values, weights, others, rows, products;

  template <typename Params>
  Status Read(int64_t num_rows, const Dims& weights_shape, Params* params) const {
    const int64_t tokens = values.dim(0), width = values.dim(1);
    const Dims shape = {num_rows, width};
    EP_RETURN_IF_ERROR(values.Read(values.type(), {tokens, width}, &params->values));
    EP_RETURN_IF_ERROR(rows.Read(values.type(), shape, &params->out));
    const bool weighted = !weights.absent(weights_shape.size()), compared = !others.absent(2);
    params->type = cuda::RowType::kBytes;
    if (weighted || compared) EP_RETURN_IF_ERROR(values.ReadFloatType(&params->type));
    EP_RETURN_IF_ERROR(weights.ReadIfGiven(weights_shape, &params->weights));
    EP_RETURN_IF_ERROR(products.ReadIf(compared, {num_rows}, &params->products));
    if (compared) EP_RETURN_IF_ERROR(others.Read(values.type(), shape, &params->others));
    params->rows = static_cast<int32_t>(num_rows);
    params->tokens = static_cast<int32_t>(tokens);
    params->row_bytes = width * values.element_bytes();
    return Status();
  }
};

// ep_gather_rows_v1(source s32 [rows], values [T, H], weights f32 [T * slots] or [0],
//                   others [rows, H] or [0, 0]; slots) -> [rows, H], products f32 [rows] or [0]
Status LaunchGather(const CallFrame& frame, cudaStream_t stream, int64_t slots) {
  EP_RETURN_IF_ERROR(frame.CheckCount(4, 2));
  const auto [source, values, weights, others] =
      frame.Args("source", "values", "weights", "others");
  const auto [rows, products] = frame.Rets("rows", "products");
  cuda::GatherRowsParams params{};
  EP_RETURN_IF_ERROR(source.Read({source.dim(0)}, &params.source));
  const TokenRows moved{values, weights, others, rows, products};
  EP_RETURN_IF_ERROR(moved.Read(source.dim(0), {values.dim(0) * slots}, &params));
  params.slots = static_cast<int32_t>(slots);
  return cuda::Check(cuda::LaunchGatherRows(stream, params), frame.call);
}

// ep_spread_rows_v1(source s32 [rows], slot_row s32 [T, S], values [T, H],
//                   weights f32 [T, S] or [0, 0], others [rows, H] or [0, 0])
//   -> [rows, H], products f32 [rows] or [0]
Status LaunchSpread(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(5, 2));
  const auto [source, slot_row, values, weights, others] =
      frame.Args("source", "slot_row", "values", "weights", "others");
  const auto [rows, products] = frame.Rets("rows", "products");
  const Dims slots = {values.dim(0), slot_row.dim(1)};
  cuda::SpreadRowsParams params{};
  EP_RETURN_IF_ERROR(source.Read({source.dim(0)}, &params.source));
  EP_RETURN_IF_ERROR(slot_row.Read(slots, &params.slot_row));
  const TokenRows moved{values, weights, others, rows, products};
  EP_RETURN_IF_ERROR(moved.Read(source.dim(0), slots, &params));
  params.slots = static_cast<int32_t>(slots[1]);
  return cuda::Check(cuda::LaunchSpreadRows(stream, params), frame.call);
}

// ep_sum_rows_v1(slot_row s32 [T, S], rows [R, H], weights f32 [T, S] or [0, 0]) -> [T, H]
Status LaunchSum(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 1));
  const auto [slot_row, rows, weights] = frame.Args("slot_row", "rows", "weights");
  const auto [sums] = frame.Rets("sums");
  const Dims slots = {slot_row.dim(0), slot_row.dim(1)};
  const int64_t width = rows.dim(1);
  cuda::SumRowsParams params{};
  EP_RETURN_IF_ERROR(slot_row.Read(slots, &params.slot_row));
  EP_RETURN_IF_ERROR(rows.Read(rows.type(), {rows.dim(0), width}, &params.rows));
  EP_RETURN_IF_ERROR(rows.ReadFloatType(&params.type));
  EP_RETURN_IF_ERROR(sums.Read(rows.type(), {slots[0], width}, &params.out));
  EP_RETURN_IF_ERROR(weights.ReadIfGiven(slots, &params.weights));
  params.tokens = static_cast<int32_t>(slots[0]);
  params.slots = static_cast<int32_t>(slots[1]);
  params.num_rows = static_cast<int32_t>(rows.dim(0));
  params.row_bytes = width * rows.element_bytes();
  return cuda::Check(cuda::LaunchSumRows(stream, params), frame.call);
}

// ep_sum_scaled_rows_v1(slot_row s32 [T, S], data u8 [R, H] e4m3, scale f32 [R, ceil(H / 128)])
//   -> [T, H]
Status LaunchSumScaled(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 1));
  const auto [slot_row, data, scale] = frame.Args("slot_row", "data", "scale");
  const auto [sums] = frame.Rets("sums");
  const int64_t tokens = slot_row.dim(0), rows = data.dim(0), width = data.dim(1);
  const int64_t tiles = (width + cuda::kTile - 1) / cuda::kTile;
  cuda::SumScaledRowsParams params{};
  EP_RETURN_IF_ERROR(slot_row.Read({tokens, slot_row.dim(1)}, &params.slot_row));
  EP_RETURN_IF_ERROR(data.Read({rows, width}, &params.data));
  EP_RETURN_IF_ERROR(scale.Read({rows, tiles}, &params.scale));
  EP_RETURN_IF_ERROR(sums.ReadFloatType(&params.type));
  EP_RETURN_IF_ERROR(sums.Read(sums.type(), {tokens, width}, &params.out));
  params.tokens = static_cast<int32_t>(tokens);
  params.slots = static_cast<int32_t>(slot_row.dim(1));
  params.num_rows = static_cast<int32_t>(rows);
  params.width = static_cast<int32_t>(width);
  return cuda::Check(cuda::LaunchSumScaledRows(stream, params), frame.call);
}

}  // namespace

EP_RUNTIME_STREAM_CALL(kGatherRowsV1, "ep_gather_rows_v1", LaunchGather, .Attr<int64_t>("slots"));
EP_RUNTIME_STREAM_CALL(kSpreadRowsV1, "ep_spread_rows_v1", LaunchSpread);
EP_RUNTIME_STREAM_CALL(kSumRowsV1, "ep_sum_rows_v1", LaunchSum);
EP_RUNTIME_STREAM_CALL(kSumScaledRowsV1, "ep_sum_scaled_rows_v1", LaunchSumScaled);

}  // namespace ep_runtime
