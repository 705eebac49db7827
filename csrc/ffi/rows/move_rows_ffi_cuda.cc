#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/rows/move_rows.h"
#include "ffi/read_call.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

// ep_gather_rows_v1(source s32 [rows], values [T, H], weights f32 [T * slots] or [0],
//                   others [rows, H] or [0, 0]; slots) -> [rows, H], products f32 [rows] or [0]
Status LaunchGather(CallFrame frame, cudaStream_t stream, int64_t slots) {
  frame.call = "ep_gather_rows_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 4, 2));
  const Buffer& source = frame.args[0];
  const Buffer& values = frame.args[1];
  const Buffer& weights = frame.args[2];
  const Buffer& others = frame.args[3];
  const int64_t rows = source.dim(0), tokens = values.dim(0), width = values.dim(1);
  EP_RETURN_IF_ERROR(CheckArray(frame, "source", source, DataType::S32, {rows}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "values", values, {tokens, width}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "rows", frame.rets[0], values.dtype, {rows, width}));
  cuda::GatherRowsParams params{};
  params.type = cuda::RowType::kBytes;
  const bool weighted = weights.dims != Dims{0}, compared = others.dims != Dims{0, 0};
  if (weighted || compared)
    EP_RETURN_IF_ERROR(ReadFloatRows(frame, "values", values, &params.type));
  if (weighted) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", weights, DataType::F32, {tokens * slots}));
    params.weights = static_cast<const float*>(weights.data);
  }
  const int64_t products = compared ? rows : 0;
  EP_RETURN_IF_ERROR(CheckArray(frame, "products", frame.rets[1], DataType::F32, {products}));
  if (compared) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "others", others, values.dtype, {rows, width}));
    params.others = others.data;
    params.products = static_cast<float*>(frame.rets[1].data);
  }
  params.rows = static_cast<int32_t>(rows);
  params.tokens = static_cast<int32_t>(tokens);
  params.slots = static_cast<int32_t>(slots);
  params.row_bytes = width * ElementBytes(values);
  params.source = static_cast<const int32_t*>(source.data);
  params.values = values.data;
  params.out = frame.rets[0].data;
  return cuda::Check(cuda::LaunchGatherRows(stream, params), frame.call);
}

// ep_spread_rows_v1(source s32 [rows], slot_row s32 [T, S], values [T, H],
//                   weights f32 [T, S] or [0, 0], others [rows, H] or [0, 0])
//   -> [rows, H], products f32 [rows] or [0]
Status LaunchSpread(CallFrame frame, cudaStream_t stream) {
  frame.call = "ep_spread_rows_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 5, 2));
  const Buffer& source = frame.args[0];
  const Buffer& slot_row = frame.args[1];
  const Buffer& values = frame.args[2];
  const Buffer& weights = frame.args[3];
  const int64_t rows = source.dim(0), tokens = values.dim(0), width = values.dim(1);
  const Dims slots = {tokens, slot_row.dim(1)};
  EP_RETURN_IF_ERROR(CheckArray(frame, "source", source, DataType::S32, {rows}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "slot_row", slot_row, DataType::S32, slots));
  EP_RETURN_IF_ERROR(CheckShape(frame, "values", values, {tokens, width}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "rows", frame.rets[0], values.dtype, {rows, width}));
  cuda::SpreadRowsParams params{};
  params.type = cuda::RowType::kBytes;
  const Buffer& others = frame.args[4];
  const bool weighted = weights.dims != Dims{0, 0}, compared = others.dims != Dims{0, 0};
  if (weighted || compared)
    EP_RETURN_IF_ERROR(ReadFloatRows(frame, "values", values, &params.type));
  if (weighted) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", weights, DataType::F32, slots));
    params.weights = static_cast<const float*>(weights.data);
  }
  const int64_t products = compared ? rows : 0;
  EP_RETURN_IF_ERROR(CheckArray(frame, "products", frame.rets[1], DataType::F32, {products}));
  if (compared) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "others", others, values.dtype, {rows, width}));
    params.others = others.data;
    params.products = static_cast<float*>(frame.rets[1].data);
  }
  params.rows = static_cast<int32_t>(rows);
  params.tokens = static_cast<int32_t>(tokens);
  params.slots = static_cast<int32_t>(slots[1]);
  params.row_bytes = width * ElementBytes(values);
  params.source = static_cast<const int32_t*>(source.data);
  params.slot_row = static_cast<const int32_t*>(slot_row.data);
  params.values = values.data;
  params.out = frame.rets[0].data;
  return cuda::Check(cuda::LaunchSpreadRows(stream, params), frame.call);
}

// ep_sum_rows_v1(slot_row s32 [T, S], rows [R, H], weights f32 [T, S] or [0, 0]) -> [T, H]
Status LaunchSum(CallFrame frame, cudaStream_t stream) {
  frame.call = "ep_sum_rows_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  const Buffer& slot_row = frame.args[0];
  const Buffer& rows = frame.args[1];
  const Buffer& weights = frame.args[2];
  const Dims slots = {slot_row.dim(0), slot_row.dim(1)};
  const int64_t width = rows.dim(1);
  cuda::SumRowsParams params{};
  EP_RETURN_IF_ERROR(CheckArray(frame, "slot_row", slot_row, DataType::S32, slots));
  EP_RETURN_IF_ERROR(CheckShape(frame, "rows", rows, {rows.dim(0), width}));
  EP_RETURN_IF_ERROR(ReadFloatRows(frame, "rows", rows, &params.type));
  EP_RETURN_IF_ERROR(CheckArray(frame, "sums", frame.rets[0], rows.dtype, {slots[0], width}));
  if (weights.dims != Dims{0, 0}) {
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", weights, DataType::F32, slots));
    params.weights = static_cast<const float*>(weights.data);
  }
  params.tokens = static_cast<int32_t>(slots[0]);
  params.slots = static_cast<int32_t>(slots[1]);
  params.num_rows = static_cast<int32_t>(rows.dim(0));
  params.row_bytes = width * ElementBytes(rows);
  params.slot_row = static_cast<const int32_t*>(slot_row.data);
  params.rows = rows.data;
  params.out = frame.rets[0].data;
  return cuda::Check(cuda::LaunchSumRows(stream, params), frame.call);
}

ffi::Error RunGather(cudaStream_t stream, int64_t slots, ffi::RemainingArgs args,
                     ffi::RemainingRets rets) {
  return Answer(args, rets,
                [&](CallFrame frame) { return LaunchGather(std::move(frame), stream, slots); });
}

template <Status (*launch)(CallFrame, cudaStream_t)>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) { return launch(std::move(frame), stream); });
}

XLA_FFI_DEFINE_HANDLER(kGather, RunGather,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("slots")
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kSpread, Run<LaunchSpread>,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kSum, Run<LaunchSum>,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kGatherRowsV1 = kGather;
XLA_FFI_Handler* const kSpreadRowsV1 = kSpread;
XLA_FFI_Handler* const kSumRowsV1 = kSum;

}  // namespace ep_runtime
