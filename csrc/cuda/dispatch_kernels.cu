#include <algorithm>

#include "cuda/dispatch_kernels.h"
#include "cuda/place_rows.cuh"
#include "cuda/push_rows.cuh"
#include "cuda/row_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kMaxDispatchWarps = 15;
constexpr int kSharedBytes = 220 * 1024;  // of 227 KB; the index needs the rest

struct DispatchShared {
  LoadBarrier barriers[kMaxDispatchWarps * kMaxBuffers];
  StagedIndexShared index;
};

// Zeros for padding, from the warp's first buffer.
__device__ void ZeroPadding(const DispatchParams& params, const Ring& ring, int warp, int warps) {
  const int lane = threadIdx.x % 32;
  auto* words = reinterpret_cast<uint4*>(ring.Buffer(0));
  for (uint32_t i = lane; i < ring.piece_bytes / 16; i += 32) words[i] = make_uint4(0, 0, 0, 0);
  FenceProxyAsync();
  __syncwarp();
  auto* recv = static_cast<uint8_t*>(params.recv);
  const int zones = VisitPadding(params.plan, params.sizes, warp, warps, [&](int row) {
    if (lane != 0) return;
    params.recv_weights[row] = 0.0f;
    for (uint32_t at = 0; at < params.row_bytes; at += ring.piece_bytes) {
      BulkStore(recv + int64_t{row} * params.row_bytes + at, ring.Buffer(0),
                min(ring.piece_bytes, params.row_bytes - at));
    }
  });
  if (lane == 0) {
    CommitStores();
    WaitStoresRead<0>();
  }
  for (int row = zones + warp * 32 + lane; row < params.sizes.capacity; row += warps * 32) {
    params.recv_weights[row] = 0.0f;
  }
  __syncwarp();
}

// Copies staged rows to their slab rows as they arrive. Warp `warp` of `warps` takes every
// warps-th, sources in turn, which is about the order of arrival.
template <int kBuffers>
__device__ void PlaceRows(const Call& call, const DispatchParams& params, const Ring& ring,
                          int pieces, int warp, int warps) {
  const int lane = threadIdx.x % 32;
  const int peers = call.ranks - 1;
  const SourceCounts counts(call, params.plan, params.sizes.tokens);
  auto* recv = static_cast<uint8_t*>(params.recv);
  int q = 0;
  for (int64_t item = warp; peers > 0 && item / peers < counts.most; item += warps) {
    const int32_t staged = static_cast<int32_t>(item / peers);
    const int source = (call.me + 1 + static_cast<int>(item % peers)) % call.ranks;
    if (staged >= __shfl_sync(~0u, counts.staged, source)) continue;
    const int64_t first = __shfl_sync(~0u, counts.first, source);
    const EntryRows entries = ReadEntries(params.plan, params.sizes, first + staged);
    bool alive = true;
    if (lane == 0) {
      alive = AwaitWord(call, call.Ready(call.me, source) + staged, call.tag, source);
      FenceProxyAsync();
    }
    if (__shfl_sync(~0u, alive, 0) == 0) break;
    const uint8_t* row = call.Rows(call.me, source) + int64_t{staged} * params.row_bytes;
    for (int piece = 0; piece < pieces; ++piece, ++q) {
      const uint32_t offset = piece * ring.piece_bytes;
      const uint32_t bytes = min(ring.piece_bytes, params.row_bytes - offset);
      const int slot = q % kBuffers;
      if (lane == 0) {
        WaitStoresRead<kBuffers - 1>();
        ring.barriers[slot].Load(ring.Buffer(slot), row + offset, bytes);
        ring.barriers[slot].Wait(q / kBuffers & 1);
      }
      for (int i = 0; i < entries.count; ++i) {
        const int64_t to = __shfl_sync(~0u, entries.row, i);
        if (lane == 0 && to >= 0) {
          BulkStore(recv + to * params.row_bytes + offset, ring.Buffer(slot), bytes);
        }
      }
      if (lane == 0) CommitStores();
    }
    if (entries.row >= 0) {
      float weight = 1.0f;
      if (params.weights != nullptr) {
        const auto* sent = reinterpret_cast<const float*>(call.Entries(call.me, source));
        weight = __ldcg(&sent[int64_t{staged} * params.sizes.top_k + entries.slot]);
      }
      params.recv_weights[entries.row] = weight;
    }
  }
  if (lane == 0) WaitStores<0>();
}

template <int kBuffers>
__global__ void __launch_bounds__(kMaxDispatchWarps * 32, 1)
    DispatchKernel(const __grid_constant__ DispatchParams params, int piece_bytes, int pieces,
                   uint32_t nan) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ DispatchShared shared;
  const Call call = BeginCall(params.group, params.name, OpCode::kDispatch);
  const int block_warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  const bool push = static_cast<int>(blockIdx.x) < params.grid.push_blocks;
  if (!call.dead) {
    const Ring ring = MakeRing(dynamic, shared.barriers, piece_bytes, kBuffers);
    if (push) {
      const PushJob job{static_cast<const uint8_t*>(params.tokens),
                        params.weights,
                        params.plan.dst_rank,
                        params.plan.dst_row,
                        params.sizes.tokens,
                        params.sizes.top_k,
                        params.sizes.capacity,
                        params.row_bytes,
                        pieces};
      auto* recv = static_cast<uint8_t*>(params.recv);
      const auto keep = [&](int64_t, const TokenSlots& slots, uint32_t mine, const uint8_t* buffer,
                            uint32_t offset, uint32_t bytes) {
        if (offset == 0 && (mine >> lane & 1) != 0) params.recv_weights[slots.row] = slots.weight;
        for (; mine != 0; mine &= mine - 1) {
          const int64_t row = __shfl_sync(~0u, slots.row, __ffs(mine) - 1);
          if (lane == 0) BulkStore(recv + row * params.row_bytes + offset, buffer, bytes);
        }
      };
      if (IndexTokens(call, &shared.index, job.dst_rank, job.top_k, 0, job.tokens, blockIdx.x,
                      params.grid.push_blocks)) {
        PushRows<kBuffers>(call, job, ring, threadIdx.x / 32 * params.grid.push_blocks + blockIdx.x,
                           params.grid.push_blocks * block_warps, keep);
      }
    } else {
      const int block = blockIdx.x - params.grid.push_blocks;
      const int warp = threadIdx.x / 32 * params.grid.place_blocks + block;
      const int warps = params.grid.place_blocks * block_warps;
      if (warp == 0) CountReceived(call, params.name, params.plan);
      ZeroPadding(params, ring, warp, warps);
      PlaceRows<kBuffers>(call, params, ring, pieces, warp, warps);
    }
  }
  const Output outputs[] = {{params.recv, int64_t{params.sizes.capacity} * params.row_bytes, nan},
                            {params.recv_weights, int64_t{params.sizes.capacity} * 4, 0x7FC00000u}};
  EndCall(call, outputs);
}

// One row's gradient from its token's: out = weight * grad, and grad . expert_out over the halving
// tree. `scratch` holds (H + 1) / 2 floats.
template <RowType kType>
__device__ void PlaceGrad(const CombineBwdParams& params, const uint4* grad, int64_t row,
                          float* scratch) {
  using E = Element<kType>;
  const int lane = threadIdx.x % 32;
  const int vectors = params.row_bytes / 16;
  auto* out =
      reinterpret_cast<uint4*>(static_cast<uint8_t*>(params.d_expert_out) + row * params.row_bytes);
  const bool scale = params.weights != nullptr;
  const float weight = scale ? params.weights[row] : 1.0f;
  for (int i = lane; i < vectors; i += 32) {
    uint4 v = LoadShared(grad + i);
    if (scale) {
      float x[E::kPerVector];
      E::Unpack(v, x);
#pragma unroll
      for (int j = 0; j < E::kPerVector; ++j) x[j] = __fmul_rn(weight, x[j]);
      v = E::Pack(x);
    }
    StoreVector(out + i, v);
  }
  if (params.expert_out == nullptr) return;
  using Storage = typename E::Storage;
  const auto* g = reinterpret_cast<const Storage*>(grad);
  const auto* x = reinterpret_cast<const Storage*>(static_cast<const uint8_t*>(params.expert_out) +
                                                   row * params.row_bytes);
  const auto product = [&](int i) {
    const Storage left = *const_cast<const volatile Storage*>(g + i);
    return __fmul_rn(E::Widen(left), E::Widen(x[i]));
  };
  int half = (params.sizes.width + 1) / 2;
  const int pairs = params.sizes.width - half;
  for (int i = lane; i < half; i += 32) {
    scratch[i] = i < pairs ? __fadd_rn(product(i), product(half + i)) : product(i);
  }
  __syncwarp();
  for (int left = half; left > 1; left = half) {
    half = (left + 1) / 2;
    for (int i = lane; i < left - half; i += 32) {
      scratch[i] = __fadd_rn(scratch[i], scratch[half + i]);
    }
    __syncwarp();
  }
  if (lane == 0) params.d_weights[row] = scratch[0];
  __syncwarp();
}

// Zeros wherever no row is: padding and past the last zone.
__device__ void ZeroEmptyGrads(const CombineBwdParams& params, int warp, int warps) {
  const int lane = threadIdx.x % 32;
  auto* out = static_cast<uint8_t*>(params.d_expert_out);
  const auto zero = [&](int row) {
    auto* to = reinterpret_cast<uint4*>(out + int64_t{row} * params.row_bytes);
    for (int i = lane; i < params.row_bytes / 16; i += 32) to[i] = make_uint4(0, 0, 0, 0);
    if (lane == 0 && params.d_weights != nullptr) params.d_weights[row] = 0.0f;
  };
  const int zones = VisitPadding(params.plan, params.sizes, warp, warps, zero);
  for (int row = zones + warp; row < params.sizes.capacity; row += warps) zero(row);
}

template <RowType kType>
__device__ void PlaceGrads(const Call& call, const CombineBwdParams& params, float* scratch,
                           int warp, int warps) {
  const int lane = threadIdx.x % 32;
  const int peers = call.ranks - 1;
  const SourceCounts counts(call, params.plan, params.sizes.tokens);
  for (int64_t item = warp; peers > 0 && item / peers < counts.most; item += warps) {
    const int32_t staged = static_cast<int32_t>(item / peers);
    const int source = (call.me + 1 + static_cast<int>(item % peers)) % call.ranks;
    if (staged >= __shfl_sync(~0u, counts.staged, source)) continue;
    const int64_t first = __shfl_sync(~0u, counts.first, source);
    const EntryRows entries = ReadEntries(params.plan, params.sizes, first + staged);
    bool alive = true;
    if (lane == 0) {
      alive = AwaitWord(call, call.Ready(call.me, source) + staged, call.tag, source);
      FenceProxyAsync();
    }
    if (__shfl_sync(~0u, alive, 0) == 0) break;
    const auto* grad = reinterpret_cast<const uint4*>(call.Rows(call.me, source) +
                                                      int64_t{staged} * params.row_bytes);
    for (int i = 0; i < entries.count; ++i) {
      const int64_t row = __shfl_sync(~0u, entries.row, i);
      if (row >= 0) PlaceGrad<kType>(params, grad, row, scratch);
    }
  }
}

template <RowType kType>
__global__ void __launch_bounds__(kMaxDispatchWarps * 32, 1)
    CombineBwdKernel(const __grid_constant__ CombineBwdParams params, int piece_bytes, int pieces,
                     int warp_bytes, uint32_t nan) {
  constexpr int kBuffers = 2;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ DispatchShared shared;
  const Call call = BeginCall(params.group, params.name, OpCode::kCombineBwd);
  const int block_warps = blockDim.x / 32;
  const bool push = static_cast<int>(blockIdx.x) < params.grid.push_blocks;
  // Buffers of all warps first, then one scratch for each.
  auto* scratch = reinterpret_cast<float*>(
      dynamic + static_cast<size_t>(block_warps) * kBuffers * piece_bytes +
      static_cast<size_t>(threadIdx.x / 32) * (warp_bytes - kBuffers * piece_bytes));
  if (!call.dead && push) {
    const Ring ring = MakeRing(dynamic, shared.barriers, piece_bytes, kBuffers);
    const PushJob job{static_cast<const uint8_t*>(params.grad),
                      nullptr,
                      params.plan.dst_rank,
                      params.plan.dst_row,
                      params.sizes.tokens,
                      params.sizes.top_k,
                      params.sizes.capacity,
                      params.row_bytes,
                      pieces};
    const auto keep = [&](int64_t token, const TokenSlots& slots, uint32_t mine, const uint8_t*,
                          uint32_t offset, uint32_t) {
      if (offset != 0) return;
      const auto* grad = reinterpret_cast<const uint4*>(job.rows + token * params.row_bytes);
      for (; mine != 0; mine &= mine - 1) {
        const int64_t row = __shfl_sync(~0u, slots.row, __ffs(mine) - 1);
        PlaceGrad<kType>(params, grad, row, scratch);
      }
    };
    if (IndexTokens(call, &shared.index, job.dst_rank, job.top_k, 0, job.tokens, blockIdx.x,
                    params.grid.push_blocks)) {
      PushRows<kBuffers>(call, job, ring, threadIdx.x / 32 * params.grid.push_blocks + blockIdx.x,
                         params.grid.push_blocks * block_warps, keep);
    }
  } else if (!call.dead) {
    const int block = blockIdx.x - params.grid.push_blocks;
    const int warp = threadIdx.x / 32 * params.grid.place_blocks + block;
    const int warps = params.grid.place_blocks * block_warps;
    ZeroEmptyGrads(params, warp, warps);
    PlaceGrads<kType>(call, params, scratch, warp, warps);
  }
  const Output outputs[] = {
      {params.d_expert_out, int64_t{params.sizes.capacity} * params.row_bytes, nan},
      {params.d_weights, params.d_weights != nullptr ? int64_t{params.sizes.capacity} * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

bool GoodSizes(const CallSizes& sizes, const DispatchGrid& grid, int32_t row_bytes) {
  return sizes.top_k >= 1 && sizes.top_k <= kMaxTopK && row_bytes > 0 && row_bytes % 16 == 0 &&
         sizes.tokens >= 0 && grid.push_blocks >= 1 && grid.place_blocks >= 1 &&
         grid.push_blocks <= kMaxBlocks && grid.warps >= 1 && grid.buffers >= 2 &&
         grid.buffers <= kMaxBuffers;
}

template <typename Kernel, typename... Args>
cudaError_t Launch(Kernel* kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDispatch(cudaStream_t stream, const DispatchParams& params) {
  const DispatchGrid& grid = params.grid;
  if (!GoodSizes(params.sizes, grid, params.row_bytes)) return cudaErrorInvalidValue;
  const int piece_bytes = std::min(params.row_bytes, kPieceBytes);
  const int pieces = (params.row_bytes + piece_bytes - 1) / piece_bytes;
  const int warp_bytes = grid.buffers * piece_bytes;
  const int warps = std::min({grid.warps, kMaxDispatchWarps, kSharedBytes / warp_bytes});
  const int blocks = grid.push_blocks + grid.place_blocks;
  const auto kernel = grid.buffers == 2   ? DispatchKernel<2>
                      : grid.buffers == 3 ? DispatchKernel<3>
                                          : DispatchKernel<4>;
  return Launch(kernel, blocks, warps * 32, warps * warp_bytes, stream, params, piece_bytes, pieces,
                NanPattern(params.type));
}

cudaError_t LaunchCombineBwd(cudaStream_t stream, const CombineBwdParams& params) {
  const DispatchGrid& grid = params.grid;
  if (!GoodSizes(params.sizes, grid, params.row_bytes)) return cudaErrorInvalidValue;
  if ((params.expert_out == nullptr) != (params.d_weights == nullptr)) return cudaErrorInvalidValue;
  const int piece_bytes = std::min(params.row_bytes, kPieceBytes);
  const int pieces = (params.row_bytes + piece_bytes - 1) / piece_bytes;
  const int scratch_bytes =
      static_cast<int>(AlignUp((params.sizes.width + 1) / 2 * int64_t{4}, 128));
  const int warp_bytes = 2 * piece_bytes + scratch_bytes;
  const int warps = std::min(kMaxDispatchWarps, kSharedBytes / warp_bytes);
  const auto kernel = params.type == RowType::kF32    ? CombineBwdKernel<RowType::kF32>
                      : params.type == RowType::kBF16 ? CombineBwdKernel<RowType::kBF16>
                      : params.type == RowType::kF16  ? CombineBwdKernel<RowType::kF16>
                                                      : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return Launch(kernel, grid.push_blocks + grid.place_blocks, warps * 32, warps * warp_bytes,
                stream, params, piece_bytes, pieces, warp_bytes, NanPattern(params.type));
}

}  // namespace cuda
}  // namespace ep_runtime
