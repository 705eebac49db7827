#include <string>

#include "cuda/device/driver.h"
#include "cuda/movement/bench/bench_kernels.h"
#include "ffi/cuda_call.h"

namespace ep_runtime {
namespace {

using xla::ffi::DataType;

constexpr int kCeilingWarps = 15;  // 4 reach the link as well, on 20 blocks and more
constexpr int64_t kMaxHoldNs = 100'000'000;

}  // namespace

// ep_dispatch_ceiling_v1, ep_combine_ceiling_v1, on as many blocks as that op has:
//   (rank, layer_index, rows [R, H], dst_rank [S, K], dst_row [S, K]), S <= R -> blocks s32 [1]
Status LaunchCeilingCall(const CudaCall& call) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(CheckCount(frame, 5, 1));
  const Buffer& rows = frame.args[2];
  const Buffer& dst_rank = frame.args[3];
  const Dims slots = {dst_rank.dim(0), dst_rank.dim(1)};
  EP_RETURN_IF_ERROR(CheckArray(frame, "dst_rank", dst_rank, DataType::S32, slots));
  EP_RETURN_IF_ERROR(CheckArray(frame, "dst_row", frame.args[4], DataType::S32, slots));
  EP_RETURN_IF_ERROR(CheckArray(frame, "blocks", frame.rets[0], DataType::S32, {1}));
  if (rows.dims.size() != 2 || rows.dim(0) < slots[0]) {
    return CheckShape(frame, "rows", rows, {slots[0], rows.dim(1)});
  }
  cuda::CeilingParams params{};
  EP_RETURN_IF_ERROR(call.RowBytes("rows", rows, rows.dim(1), &params.row_bytes));
  const cuda::LaunchBlocks& blocks = call.group.blocks();
  const bool combine = frame.op == OpCode::kCombine;
  params.group = call.rank.group;
  params.rows = rows.data;
  params.dst_rank = static_cast<const int32_t*>(dst_rank.data);
  params.dst_row = static_cast<const int32_t*>(frame.args[4].data);
  params.count = static_cast<int32_t>(slots[0]);
  params.top_k = static_cast<int32_t>(slots[1]);
  params.blocks = combine ? blocks.reduce + blocks.sum : blocks.push + blocks.place;
  params.warps = kCeilingWarps;
  params.result = static_cast<int32_t*>(frame.rets[0].data);
  return call.Launched(cuda::LaunchCeiling(call.stream, params));
}

// ep_clock_v1(token s32 [1], anything...; hold_ns) -> token s32 [1], nanoseconds u32 [2], low word
// first
Status LaunchClockCall(const CallFrame& frame, cudaStream_t stream, int64_t hold_ns) {
  if (frame.args.empty()) return InvalidArgument("ep_clock_v1 needs a token");
  EP_RETURN_IF_ERROR(CheckCount(frame, frame.args.size(), 2));
  EP_RETURN_IF_ERROR(CheckArray(frame, "token", frame.args[0], DataType::S32, {1}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "token", frame.rets[0], DataType::S32, {1}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "now", frame.rets[1], DataType::U32, {2}));
  if (hold_ns < 0 || hold_ns > kMaxHoldNs) {
    return InvalidArgument("ep_clock_v1: hold_ns must be 0 to " + std::to_string(kMaxHoldNs) +
                           ", got " + std::to_string(hold_ns));
  }
  const cuda::ClockParams params{
      static_cast<const int32_t*>(frame.args[0].data), static_cast<int32_t*>(frame.rets[0].data),
      static_cast<uint32_t*>(frame.rets[1].data), static_cast<uint64_t>(hold_ns)};
  return cuda::Check(cuda::LaunchClock(stream, params), "the clock's launch");
}

}  // namespace ep_runtime
