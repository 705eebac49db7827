// Kernels of combine and of dispatch's backward, a combine of d_recv that also carries d_weights.
//
// One kernel: the first `sum_blocks` blocks sum this rank's tokens, the others send and then help.
//
//   who                   does                                         waits for
//   sum block 0           TellTable: how many tokens each rank keeps   nobody
//                         before some of them -> scratch (barrier 1)
//     the last warp       TellCall                                     nobody
//   reduce block: all     PeerSums: of a peer's token, its rows here   the last warp, if that
//   warps but the last    in slot order -> SumPlaces;                  is 8 sums behind
//                         d_weights -> Entries(peer, me)
//     the last            Publish: Ready(peer, me)[staged]             the block's other warps
//     all, then           work like a sum block                        nobody
//   every warp            waits for the table                          sum block 0
//                         TokenSums: sums of lower ranks, own rows,    Ready(me, rank)[staged] of
//                         sums of higher ranks -> tokens;              all peers that have a part
//                         d_weights of all -> d_topk_weights
//
// F(dest, source) is in the window of `dest`, in the lane of this call, and only `source` writes
// it. One warp sums a token, or a staged row of a peer. With few tokens a warp sums only a slice of
// a row. A warp's first sum is fixed; later sums are drawn from a counter.
//
// A token is summed in a fixed order, whichever warp takes it and whichever part arrives first:
// ranks in order, the rows of a rank in slot order. Each rank's part is rounded to the format that
// it travels in (CombinePrecision), and this rank's own part is rounded too. So runs are equal bit
// for bit.
//
// Memory order: a sum is in the peer's window before its flag. The warp stores the sum, syncs, and
// counts the sum with release. The last warp acquires the count, executes one fence of system scope
// for all sums it found, and stores their flags. In a warp that sums a token, each lane acquires
// the flag of one rank. The lanes sync and execute a proxy fence (FenceProxyAsync), because the
// copy engine loads the parts.
//
// Waits cannot deadlock: sums for peers wait for no peer, sums of tokens wait only for sums from
// peers, and the table waits for no peer either. All blocks are resident at once. If a lane has no
// room for the exact sums of all tokens, each half of the tokens has its own launch and epoch.
// call.cuh explains the begin and end of a call, and why its lane is free. A failed call fills its
// outputs with NaN.

#include <algorithm>

#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/combine/landed_sums.cuh"
#include "cuda/movement/combine/part_sums.cuh"
#include "cuda/movement/combine/peer_sums.cuh"
#include "cuda/movement/combine/sum_items.cuh"
#include "cuda/movement/combine/token_sums.cuh"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace combine {
namespace {

constexpr int kSharedBytes = kWarps * kRingBytes;

template <RowType kType, CombinePrecision kPrecision, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params, Pass pass, uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ LoadBarrier barriers[kWarps * kMaxSlots];
  __shared__ LandedSums<kSenders> landed;
  __shared__ TokenTable table;
  if (LeftOut(params.name.wanted)) return;
  landed.Clear();
  const DeviceCall call = BeginCall(params.group, params.name, params.op);
  const uint32_t warp = threadIdx.x / 32;
  const int sum_blocks = params.grid.sum_blocks;
  const int reduce_blocks = params.grid.reduce_blocks;
  auto ring = MakeRing<kType, kPrecision>(dynamic, barriers, params.row_bytes, params.wide_tokens);
  if (!call.dead) {
    const int32_t slices = SlicesOf(call, params, pass);
    if (blockIdx.x == 0) TellTable(call, params, pass, &table);
    WorkNumbers numbers{kItemTicket, static_cast<uint32_t>(sum_blocks * kWarps), 0};
    if (static_cast<int>(blockIdx.x) < sum_blocks) {
      if (blockIdx.x == 0 && warp == kWarps - 1) TellCall(call, params.name);
      numbers.number = warp * sum_blocks + blockIdx.x;
    } else {
      if (warp < kSenders) {
        PeerSums<kPrecision, kWeighted> peers(call, params, pass, slices, &landed,
                                              warp * reduce_blocks + blockIdx.x - sum_blocks,
                                              reduce_blocks * kSenders);
        SumItems<kType, kPrecision, kWeighted, true>(ring, peers);
        if (threadIdx.x % 32 == 0) landed.End();
      } else {
        landed.Publish(call);
      }
      // Nothing is left to send. The remaining sums wait only for peers' sending, which waits for
      // no sum.
      numbers.Draw(call);
    }
    const bool alive = threadIdx.x % 32 != 0 || AwaitBlocks(call, kTableBarrier, 1);
    if (__all_sync(~0u, alive)) {
      TokenSums<kPrecision, kWeighted> tokens(call, params, pass, slices, numbers);
      SumItems<kType, kPrecision, kWeighted, false>(ring, tokens);
    }
  }
  // Names all tokens: if the second half fails, the first half's sums must not survive.
  const Output outputs[] = {
      {params.tokens, int64_t{params.sizes.tokens} * TokenBytes<kPrecision>(params), nan},
      {params.d_topk_weights,
       params.d_topk_weights != nullptr ? int64_t{params.sizes.tokens} * params.sizes.top_k * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

template <RowType kType, CombinePrecision kPrecision>
cudaError_t LaunchPass(cudaStream_t stream, CombineParams params, const Pass& pass) {
  // Launch no more blocks than there are pieces of tokens.
  const int pieces = (params.row_bytes + kPieceBytes - 1) / kPieceBytes;
  const int most = std::max(pass.end - pass.begin, 1) * pieces;
  params.grid.sum_blocks = std::min(params.grid.sum_blocks, most);
  params.grid.reduce_blocks = std::min(params.grid.reduce_blocks, most);
  const int blocks = params.grid.reduce_blocks + params.grid.sum_blocks;
  const uint32_t nan = NanPattern(params.wide_tokens ? RowType::kF32 : params.type);
  const auto kernel = params.weights != nullptr ? CombineKernel<kType, kPrecision, true>
                                                : CombineKernel<kType, kPrecision, false>;
  const cudaError_t error = AllowSharedBytes(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(params, pass, nan);
  return cudaGetLastError();
}

template <RowType kType>
cudaError_t LaunchPasses(cudaStream_t stream, const CombineParams& params) {
  const int32_t tokens = params.sizes.tokens;
  const bool packed = params.room.Packs(tokens);
  const Pass all{0, tokens, 0, packed};
  if (params.precision == CombinePrecision::kFp8) {
    return LaunchPass<kType, CombinePrecision::kFp8>(stream, params, all);
  }
  if (params.precision == CombinePrecision::kFast || kType == RowType::kF32) {
    return LaunchPass<kType, CombinePrecision::kFast>(stream, params, all);
  }
  // The number of passes depends on static sizes only, so that it is the same on every rank. In a
  // packed call, a token has at most one sum for each of its slots.
  const int64_t sums = packed ? params.sizes.top_k : params.room.ranks - 1;
  if (sums * tokens * params.sizes.width * 4 <= params.room.bytes) {
    return LaunchPass<kType, CombinePrecision::kExact>(stream, params, all);
  }
  const int32_t half = (tokens + 1) / 2;
  constexpr auto kExact = CombinePrecision::kExact;
  const cudaError_t error = LaunchPass<kType, kExact>(stream, params, {0, half, 1, packed});
  if (error != cudaSuccess) return error;
  return LaunchPass<kType, kExact>(stream, params, {half, tokens, 2, packed});
}

}  // namespace
}  // namespace combine

cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || params.row_bytes <= 0 ||
      params.row_bytes % 16 != 0 || params.grid.reduce_blocks < 1 || params.grid.sum_blocks < 1 ||
      params.grid.sum_blocks > kMaxBlocks ||
      (params.wide_tokens &&
       (params.precision != CombinePrecision::kExact || params.type == RowType::kF32)) ||
      (params.d_weights == nullptr) != (params.d_topk_weights == nullptr)) {
    return cudaErrorInvalidValue;
  }
  switch (params.type) {
    case RowType::kF32:
      return combine::LaunchPasses<RowType::kF32>(stream, params);
    case RowType::kBF16:
      return combine::LaunchPasses<RowType::kBF16>(stream, params);
    case RowType::kF16:
      return combine::LaunchPasses<RowType::kF16>(stream, params);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace ep_runtime
