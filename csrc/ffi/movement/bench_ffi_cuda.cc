// XLA targets that only benchmarks call.
#include <string>

#include "cuda/movement/bench/bench_kernels.h"
#include "ffi/cuda_call.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

constexpr int kCeilingWarps = 15;  // 4 also reach the link's speed, with 20 blocks or more
constexpr int64_t kMaxHoldNs = 100'000'000;

// ep_clock_v1(token s32 [1], anything...; hold_ns) -> token s32 [1], nanoseconds u32 [2], low word
//   first
Status LaunchClock(const CallFrame& frame, cudaStream_t stream, int64_t hold_ns) {
  if (frame.args.empty()) return InvalidArgument("ep_clock_v1 needs a token");
  EP_RETURN_IF_ERROR(frame.CheckCount(frame.args.size(), 2));
  const auto [token] = frame.Args("token");
  const auto [token_out, now] = frame.Rets("token", "now");
  cuda::ClockParams params{};
  EP_RETURN_IF_ERROR(token.Read({1}, &params.token));
  EP_RETURN_IF_ERROR(token_out.Read({1}, &params.token_out));
  EP_RETURN_IF_ERROR(now.Read({2}, &params.now));
  if (hold_ns < 0 || hold_ns > kMaxHoldNs) {
    return InvalidArgument("ep_clock_v1: hold_ns must be 0 to " + std::to_string(kMaxHoldNs) +
                           ", got " + std::to_string(hold_ns));
  }
  params.hold_ns = static_cast<uint64_t>(hold_ns);
  return cuda::Check(cuda::LaunchClock(stream, params), "the clock's launch");
}

}  // namespace

EP_RUNTIME_STREAM_CALL(kClockV1, "ep_clock_v1", LaunchClock, .Attr<int64_t>("hold_ns"));

// ep_dispatch_ceiling_v1, ep_combine_ceiling_v1, with as many blocks as dispatch or combine:
//   (rank, layer_index, rows [R, H], dst_rank [S, K], dst_row [S, K]), S <= R -> blocks s32 [1]
Status LaunchCeilingCall(const CudaCall& call) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(5, 1));
  const auto [rank, layer_index, rows, dst_rank, dst_row] =
      call.frame.Args("rank", "layer_index", "rows", "dst_rank", "dst_row");
  const auto [result] = call.frame.Rets("blocks");
  const Dims slots = {dst_rank.dim(0), dst_rank.dim(1)};
  cuda::CeilingParams params{};
  EP_RETURN_IF_ERROR(dst_rank.Read(slots, &params.dst_rank));
  EP_RETURN_IF_ERROR(dst_row.Read(slots, &params.dst_row));
  EP_RETURN_IF_ERROR(result.Read({1}, &params.result));
  if (rows.dims().size() != 2 || rows.dim(0) < slots[0]) {
    return rows.CheckShape({slots[0], rows.dim(1)});
  }
  EP_RETURN_IF_ERROR(call.ReadRowBytes(rows, rows.dim(1), &params.row_bytes));
  const cuda::LaunchBlocks& all = call.group.blocks();
  const cuda::ExchangeBlocks& blocks = all.OfTokens(slots[0], all.beside);
  const bool combine = call.frame.op == OpCode::kCombine;
  params.group = call.rank.group;
  params.rows = rows.data();
  params.count = static_cast<int32_t>(slots[0]);
  params.top_k = static_cast<int32_t>(slots[1]);
  params.blocks = combine ? blocks.reduce + blocks.sum : blocks.push + blocks.place;
  params.warps = kCeilingWarps;
  return call.Launched(cuda::LaunchCeiling(call.stream, params));
}

}  // namespace ep_runtime
