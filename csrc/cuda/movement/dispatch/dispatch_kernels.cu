// Kernels of dispatch and of combine's backward, which is a dispatch of the gradient.
//
// One kernel: the first `push_blocks` blocks send, while the others place what arrives.
//
//   who                   does                                         waits for
//   push block: warps     PushRows: a token's row, once to each peer   its own copies
//   with buffers          that keeps it: SentPlaces; its weights:
//                         Entries(dest, me)
//     the warp after      PublishTokens: Ready(dest, me)[staged]       the block's senders
//     senders, then       place this rank's own tokens -> the slab;    (as place blocks)
//                         in combine's backward also arriving rows
//   place block: all      PlaceRows, PlaceGrads: ReceivedPlaces,       Ready(me, source)[staged]
//   warps but the last    and this rank's own tokens -> the slab
//     the last            dispatch: zeros for weights past the last    nobody
//                         zone; rows received -> the board; in the
//                         first one TellCall
//   a warp that is done   FillEmptyRows: zeros -> rows of no entry     nobody
//
// F(dest, source) is in the window of `dest`, in the lane of this call, and only `source` writes
// it. A row of the slab has one writer: the warp that took its token, or that drew its number among
// the empty rows. This rank's tokens are drawn from a counter, and so are all rows that combine's
// backward places; rows that arrive for dispatch are assigned to warps in advance. A row's bits do
// not depend on the warp that takes it.
//
// Memory order: a row is in the peer's window before its flag. The sender waits until its copies
// have landed, executes a proxy fence (FenceProxyAsync), and counts the token with release. The
// warp after the senders acquires the count, executes one fence of system scope for all tokens it
// found, and stores their flags. A placing warp acquires the flag, and executes a proxy fence
// before the copy engine loads the row. Prepare numbers staged rows in order of tokens, and tokens
// are sent in about that order. So a warp that places rows by number waits for few of them.
//
// Waits cannot deadlock: sending waits for no peer, and placing only for peers' sending. But push
// blocks must run while place blocks wait, on every rank: all blocks are resident at once. call.cuh
// explains the begin and end of a call, and why its lane is free. A failed call fills its outputs
// with NaN, or with zeros in kBytes rows.
//
// If rows are packed and a rank receives more than its lane holds, rows go in parts. Each part is a
// launch with its own epoch, and moves a share of every pair's staged rows. Launches beyond the
// last part end at once, on all ranks. The first launch also places rows that do not travel.

#include <algorithm>

#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/movement/dispatch/empty_rows.cuh"
#include "cuda/movement/dispatch/place_copies.cuh"
#include "cuda/movement/dispatch/place_grads.cuh"
#include "cuda/movement/dispatch/push_rows.cuh"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace dispatch {
namespace {

constexpr int kMaxPlaceWarps = 14;        // placing warps of a block in combine's backward
constexpr int kSharedBytes = 202 * 1024;  // out of 227 KB; barriers and counts need the rest
constexpr int kRingBytes = kSharedBytes - kZeroBytes;
constexpr int kNoRows = 0x7FFFFFFF;  // a number past the last staged row

struct DispatchShared {
  LoadBarrier barriers[kMaxSenders * kBuffers];
  LandedTokens landed;
  TokenTable table;  // used in a block that sends
  uint32_t filled;   // 1: a warp of the block found that no empty rows are left
};
static_assert(kSharedBytes + sizeof(DispatchShared) <= 226 * 1024);

// How dispatch differs from the backward of an unweighted combine, which copies rows too.
struct CopyKind {
  OpCode op;
  bool past_zones;  // true: rows past the last zone become zero too
};

// Reports how many rows this rank receives, and how many were dropped if prepare has not counted
// them. One whole warp calls this.
__device__ inline void CountReceived(const DeviceCall& call, const CallName& name, const Plan& plan,
                                     int columns) {
  const int lane = threadIdx.x % 32;
  const int32_t rows =
      __reduce_add_sync(~0u, lane < call.ranks ? plan.recv_count[lane * columns + 1] : 0);
  if (lane == 0) CountRows(call.group, name, rows, max(plan.recv_count[3], 0));
}

__device__ void ZeroWeightsPastZones(const DispatchParams& params, int part, int parts) {
  if (params.recv_weights == nullptr) return;
  const int end = EmptyRows(params.plan, params.sizes).End();
  for (int row = end + part * 32 + threadIdx.x % 32; row < params.sizes.capacity;
       row += parts * 32) {
    params.recv_weights[row] = 0.0f;
  }
}

template <typename Params>
__device__ PushJob JobOf(const Params& params, const void* rows, const float* weights, int pieces) {
  return {static_cast<const uint8_t*>(rows),
          weights,
          params.plan.dst_rank,
          params.plan.dst_row,
          params.sizes.tokens,
          params.sizes.top_k,
          params.sizes.capacity,
          params.row_bytes,
          pieces};
}
__device__ inline PushJob JobOf(const DispatchParams& params, int pieces) {
  return JobOf(params, params.tokens, params.weights, pieces);
}
__device__ inline PushJob JobOf(const CombineBwdParams& params, int pieces) {
  return JobOf(params, params.grad, nullptr, pieces);
}

// A whole warp calls this.
__device__ inline PartShare ShareOf(const Staging& staging, const Plan& plan,
                                    const CallSizes& sizes) {
  if (!staging.packed) return {0, 1};
  const PairCounts counts{plan.recv_count, staging.room.ranks, sizes.tokens};
  return {staging.part, CountParts(counts, staging)};
}

// Returns where a warp of this rank sends rows.
template <typename Params>
__device__ StagedPlaces PlacesOf(const DeviceCall& call, const Params& params,
                                 const Staging& staging, const PartShare& share) {
  const PairCounts counts{params.plan.recv_count, call.ranks, params.sizes.tokens};
  return SentPlaces(call, staging, counts, share, params.row_bytes);
}

// Counts tokens into `table`. Every thread of a block that sends calls this.
__device__ inline void CountSent(const DeviceCall& call, const PushJob& job, TokenTable* table) {
  table->Count(job.dst_rank, job.top_k, call.ranks, job.tokens);
}

// The work of a warp with buffers. In a block that sends, the warp sends its tokens and then helps
// to place rows.
__device__ void MoveRows(const DeviceCall& call, const DispatchParams& params,
                         const Staging& staging, const PartShare& part, const Ring& ring,
                         int pieces, int warps, DispatchShared* shared) {
  const int warp = threadIdx.x / 32;
  const int push_blocks = params.grid.push_blocks;
  const int place_blocks = params.grid.place_blocks;
  const int block = static_cast<int>(blockIdx.x) - push_blocks;
  int first = 0;
  if (block < 0 && call.ranks > 1) {
    const WarpShare share{static_cast<int>(warp * push_blocks + blockIdx.x), push_blocks * warps};
    first = PushRows(call, JobOf(params, pieces), PlacesOf(call, params, staging, part),
                     shared->table, ring, share, &shared->landed);
  }
  const Arriving arriving(call, params.plan, staging, part, params.sizes.tokens, params.row_bytes);
  // Rows that arrive are divided among the blocks that place.
  const int begin = block < 0 ? kNoRows : warp * place_blocks + block;
  StagedRows rows{call, params.plan, arriving, begin, place_blocks * warps};
  PlaceRows(call, params, ring, pieces, first, rows, part.part == 0);
}

__global__ void __launch_bounds__((kMaxSenders + 1) * 32, 1)
    DispatchKernel(const __grid_constant__ DispatchParams params,
                   const __grid_constant__ Staging staging, CopyKind kind, int piece_bytes,
                   int pieces, uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ DispatchShared shared;
  if (LeftOut(params.name.wanted)) return;
  const PartShare share = ShareOf(staging, params.plan, params.sizes);
  if (share.part >= share.parts) return;
  shared.landed.Clear();
  ClearZeros(dynamic, &shared.filled);
  const DeviceCall call = BeginCall(params.group, params.name, kind.op);
  const int warps = blockDim.x / 32 - 1;  // warps with buffers
  const int warp = threadIdx.x / 32;
  const int push_blocks = params.grid.push_blocks;
  const int place_blocks = params.grid.place_blocks;
  if (!call.dead) {
    const int block = static_cast<int>(blockIdx.x) - push_blocks;
    if (block < 0 && call.ranks > 1) CountSent(call, JobOf(params, pieces), &shared.table);
    if (warp < warps) {
      const Ring ring = MakeRing(dynamic + kZeroBytes, shared.barriers, piece_bytes);
      MoveRows(call, params, staging, share, ring, pieces, warps, &shared);
    } else if (block < 0) {
      if (call.ranks > 1) {
        PublishTokens(call, JobOf(params, pieces), &shared.landed, blockIdx.x, push_blocks, warps);
      }
    } else {
      if (block == 0) TellCall(call, params.name);
      if (share.part == 0) {
        if (block == 0 && kind.op == OpCode::kDispatch) {
          CountReceived(call, params.name, params.plan, staging.columns());
        }
        ZeroWeightsPastZones(params, block, place_blocks);
      }
    }
    const EmptyJob empty{RowsOf(params), params.recv_weights, kind.past_zones};
    if (share.part == 0) {
      FillEmptyRows(call, params.plan, params.sizes, empty, dynamic, &shared.filled);
    }
  }
  const int64_t capacity = params.sizes.capacity;
  const Output outputs[] = {
      {params.recv, capacity * (params.row_bytes - params.scale_bytes), nan},
      {params.recv_scale, capacity * params.scale_bytes, 0x7FC00000u},
      {params.recv_weights, params.recv_weights != nullptr ? int64_t{params.sizes.capacity} * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

struct GradLayout {
  int piece_bytes;
  int pieces;
  int push_warps;
  int tree_bytes;  // bytes of one placing warp's tree
};

template <RowType kType>
__global__ void __launch_bounds__((kMaxPlaceWarps + 1) * 32, 1)
    CombineBwdKernel(const __grid_constant__ CombineBwdParams params,
                     const __grid_constant__ Staging staging, GradLayout layout, uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ DispatchShared shared;
  if (LeftOut(params.name.wanted)) return;
  const PartShare part = ShareOf(staging, params.plan, params.sizes);
  if (part.part >= part.parts) return;
  shared.landed.Clear();
  ClearZeros(dynamic, &shared.filled);
  const DeviceCall call = BeginCall(params.group, params.name, OpCode::kCombineBwd);
  const int warp = threadIdx.x / 32;
  const int push_blocks = params.grid.push_blocks;
  const bool push = static_cast<int>(blockIdx.x) < push_blocks;
  uint8_t* rest = dynamic + kZeroBytes;
  const PushJob job = JobOf(params, layout.pieces);
  if (!call.dead && push) CountSent(call, job, &shared.table);
  if (!call.dead && push && warp < layout.push_warps) {
    const Ring ring = MakeRing(rest, shared.barriers, layout.piece_bytes);
    const WarpShare share{static_cast<int>(warp * push_blocks + blockIdx.x),
                          push_blocks * layout.push_warps};
    PushRows(call, job, PlacesOf(call, params, staging, part), shared.table, ring, share,
             &shared.landed);
    // The buffers are free now.
    if (layout.tree_bytes <= kBuffers * layout.piece_bytes) {
      PlaceGrads<kType>(call, params, staging, part, reinterpret_cast<float*>(ring.data));
    }
  } else if (!call.dead && push && warp == layout.push_warps) {
    PublishTokens(call, job, &shared.landed, blockIdx.x, push_blocks, layout.push_warps);
  } else if (!call.dead && !push && warp + 1 < static_cast<int>(blockDim.x / 32)) {
    auto* tree = reinterpret_cast<float*>(rest + warp * layout.tree_bytes);
    PlaceGrads<kType>(call, params, staging, part, tree);
  } else if (!call.dead && static_cast<int>(blockIdx.x) == push_blocks) {
    TellCall(call, params.name);
  }
  // In a block that sends, warps that do not send leave the copy engine free for the senders.
  if (!call.dead && (!push || warp <= layout.push_warps)) {
    const SlabArrays rows{static_cast<uint8_t*>(params.d_expert_out), nullptr, params.row_bytes, 0};
    const EmptyJob empty{rows, params.d_weights, params.clear_slack};
    if (part.part == 0) {
      FillEmptyRows(call, params.plan, params.sizes, empty, dynamic, &shared.filled);
    }
  }
  const Output outputs[] = {
      {params.d_expert_out, int64_t{params.sizes.capacity} * params.row_bytes, nan},
      {params.d_weights, params.d_weights != nullptr ? int64_t{params.sizes.capacity} * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

bool GoodSizes(const CallSizes& sizes, const DispatchGrid& grid, int32_t row_bytes,
               int32_t scale_bytes) {
  return scale_bytes >= 0 && scale_bytes < row_bytes && scale_bytes % 16 == 0 && sizes.top_k >= 1 &&
         sizes.top_k <= kMaxTopK && row_bytes > 0 && row_bytes % 16 == 0 && sizes.tokens >= 0 &&
         grid.push_blocks >= 1 && grid.place_blocks >= 1 && grid.push_blocks <= kMaxBlocks &&
         grid.warps >= 1;
}

template <typename Kernel, typename... Args>
cudaError_t Launch(Kernel* kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error = AllowSharedBytes(kernel, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

// Returns the grid with no more blocks than there are tokens to send and rows to write.
DispatchGrid GridOf(DispatchGrid grid, const CallSizes& sizes) {
  grid.push_blocks = std::min(grid.push_blocks, std::max(sizes.tokens, 1));
  grid.place_blocks = std::min(grid.place_blocks, std::max(sizes.capacity, 1));
  return grid;
}

// Makes one launch for each possible part.
template <typename Go>
cudaError_t InParts(const LaneRoom& room, int32_t tokens, const Go& launch) {
  Staging staging{room, room.Packs(tokens), 0, static_cast<int32_t>(room.MostParts(tokens))};
  for (; staging.part < staging.most_parts; ++staging.part) {
    const cudaError_t error = launch(staging);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCopies(cudaStream_t stream, DispatchParams params, CopyKind kind) {
  const DispatchGrid grid = params.grid = GridOf(params.grid, params.sizes);
  const int piece_bytes = std::min(params.row_bytes, kPieceBytes);
  const int pieces = (params.row_bytes + piece_bytes - 1) / piece_bytes;
  const int warp_bytes = kBuffers * piece_bytes;
  const int warps = std::min({grid.warps, kMaxSenders, kRingBytes / warp_bytes});
  return InParts(params.room, params.sizes.tokens, [&](const Staging& staging) {
    return Launch(DispatchKernel, grid.push_blocks + grid.place_blocks, (warps + 1) * 32,
                  kZeroBytes + warps * warp_bytes, stream, params, staging, kind, piece_bytes,
                  pieces, NanPattern(params.type));
  });
}

template <RowType kType>
cudaError_t LaunchGrads(cudaStream_t stream, CombineBwdParams params) {
  const DispatchGrid grid = params.grid = GridOf(params.grid, params.sizes);
  GradLayout layout{};
  layout.piece_bytes = std::min(params.row_bytes, kPieceBytes);
  layout.pieces = (params.row_bytes + layout.piece_bytes - 1) / layout.piece_bytes;
  layout.push_warps =
      std::min({grid.warps, kMaxSenders, kRingBytes / (kBuffers * layout.piece_bytes)});
  layout.tree_bytes =
      static_cast<int>(AlignUp(TreeFloats<kType>(params.sizes.width) * int64_t{4}, 128));
  const int place_warps = std::min(kMaxPlaceWarps, kRingBytes / layout.tree_bytes);
  const int warps = std::max(layout.push_warps, place_warps);
  const int rest_bytes =
      std::max(layout.push_warps * kBuffers * layout.piece_bytes, warps * layout.tree_bytes);
  return InParts(params.room, params.sizes.tokens, [&](const Staging& staging) {
    return Launch(CombineBwdKernel<kType>, grid.push_blocks + grid.place_blocks, (warps + 1) * 32,
                  kZeroBytes + rest_bytes, stream, params, staging, layout,
                  NanPattern(params.type));
  });
}

}  // namespace
}  // namespace dispatch

cudaError_t LaunchDispatch(cudaStream_t stream, const DispatchParams& params) {
  if (!dispatch::GoodSizes(params.sizes, params.grid, params.row_bytes, params.scale_bytes)) {
    return cudaErrorInvalidValue;
  }
  return dispatch::LaunchCopies(stream, params, {OpCode::kDispatch, false});
}

cudaError_t LaunchCombineBwd(cudaStream_t stream, const CombineBwdParams& params) {
  if (!dispatch::GoodSizes(params.sizes, params.grid, params.row_bytes, params.scale_bytes)) {
    return cudaErrorInvalidValue;
  }
  if ((params.expert_out == nullptr) != (params.d_weights == nullptr)) return cudaErrorInvalidValue;
  const bool bytes = params.type == RowType::kBytes;
  if (bytes != (params.scale_bytes != 0)) return cudaErrorInvalidValue;
  if (params.weights == nullptr && params.expert_out == nullptr) {
    const DispatchParams copies{params.group,        params.name,   params.sizes, params.type,
                                params.row_bytes,    params.grad,   nullptr,      params.plan,
                                params.d_expert_out, nullptr,       params.grid,  params.room,
                                params.scale_bytes,  params.d_scale};
    return dispatch::LaunchCopies(stream, copies, {OpCode::kCombineBwd, params.clear_slack});
  }
  if (bytes) return cudaErrorInvalidValue;
  return params.type == RowType::kF32    ? dispatch::LaunchGrads<RowType::kF32>(stream, params)
         : params.type == RowType::kBF16 ? dispatch::LaunchGrads<RowType::kBF16>(stream, params)
                                         : dispatch::LaunchGrads<RowType::kF16>(stream, params);
}

}  // namespace cuda
}  // namespace ep_runtime
