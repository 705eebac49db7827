#include "cuda/bulk_copy.cuh"
#include "cuda/combine_kernels.h"
#include "cuda/place_rows.cuh"
#include "cuda/row_math.cuh"
#include "cuda/staged_index.cuh"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = 2;  // of a row that a lane sums at a time
constexpr int kBatch = 4;    // rows that it reads at a time

// The tokens of one launch: all, or one half.
struct Pass {
  int32_t begin;
  int32_t end;
  int32_t half;  // 0: all, 1: first, 2: second
};

template <RowType kType>
using Sums = float[kVectors][Element<kType>::kPerVector];

template <RowType kType>
__device__ __forceinline__ void Clear(Sums<kType>& sums) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int j = 0; j < Element<kType>::kPerVector; ++j) sums[u][j] = 0.0f;
  }
}

// sums += rows row(0), row(1), ... of `count`, in order; lane i holds the i-th row and its weight.
template <RowType kType, bool kWeighted>
__device__ __forceinline__ void AddLocalRows(const uint4* rows, int vectors, int32_t row,
                                             float weight, int count, int base, Sums<kType>& sums) {
  using E = Element<kType>;
  const int lane = threadIdx.x % 32;
  for (int start = 0; start < count; start += kBatch) {
    uint4 v[kBatch][kVectors];
    int32_t at[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      at[b] = __shfl_sync(~0u, row, (start + b) & 31);
      if (start + b >= count) at[b] = -1;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int index = base + u * 32 + lane;
        if (at[b] >= 0 && index < vectors) {
          v[b][u] = LoadStream(rows + int64_t{at[b]} * vectors + index);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float w = kWeighted ? __shfl_sync(~0u, weight, (start + b) & 31) : 1.0f;
      if (at[b] < 0) continue;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (base + u * 32 + lane >= vectors) continue;
        float x[E::kPerVector];
        E::Unpack(v[b][u], x);
#pragma unroll
        for (int j = 0; j < E::kPerVector; ++j) {
          sums[u][j] = __fadd_rn(sums[u][j], kWeighted ? __fmul_rn(w, x[j]) : x[j]);
        }
      }
    }
  }
}

// One staged row: the sum of its rows goes to `out`, in the row type or in f32.
template <RowType kType, bool kExact, bool kWeighted>
__device__ void ReduceRow(const uint4* rows, int vectors, const EntryRows& entries, float weight,
                          uint4* out) {
  using E = Element<kType>;
  constexpr int kOut = kExact ? E::kPerVector / 4 : 1;
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < vectors; base += 32 * kVectors) {
    Sums<kType> sums;
    Clear<kType>(sums);
    AddLocalRows<kType, kWeighted>(rows, vectors, entries.row, weight, entries.count, base, sums);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = base + u * 32 + lane;
      if (index >= vectors) continue;
      if constexpr (kExact) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
          StoreVector(out + int64_t{index} * kOut + i,
                      Element<RowType::kF32>::Pack(&sums[u][4 * i]));
        }
      } else {
        StoreVector(out + index, E::Pack(sums[u]));
      }
    }
  }
}

// Sends the partial sums of all peers' tokens of this pass, sources in turn.
template <RowType kType, bool kExact, bool kWeighted>
__device__ void SendPartials(const Call& call, const CombineParams& params, const Pass& pass,
                             int warp, int warps) {
  const int lane = threadIdx.x % 32;
  const int peers = call.ranks - 1;
  const int vectors = params.row_bytes / 16;
  const int64_t partial_bytes = kExact ? int64_t{params.sizes.width} * 4 : params.row_bytes;
  const auto* rows = static_cast<const uint4*>(params.rows);
  const SourceCounts counts(call, params.plan, params.sizes.tokens);
  const int32_t first_half = lane < call.ranks ? params.plan.recv_count[lane * 4 + 2] : 0;
  const int32_t skip = pass.half == 2 ? min(max(first_half, 0), counts.staged) : 0;
  const int32_t count = pass.half == 1 ? min(first_half, counts.staged) : counts.staged - skip;
  const int32_t most = __reduce_max_sync(~0u, count);
  for (int64_t item = warp; peers > 0 && item / peers < most; item += warps) {
    const int32_t staged = static_cast<int32_t>(item / peers);
    const int source = (call.me + 1 + static_cast<int>(item % peers)) % call.ranks;
    if (staged >= __shfl_sync(~0u, count, source)) continue;
    const int64_t first = __shfl_sync(~0u, counts.first + skip, source);
    const EntryRows entries = ReadEntries(params.plan, params.sizes, first + staged);
    float weight = 1.0f;
    if (kWeighted && entries.row >= 0) weight = params.weights[entries.row];
    auto* out = reinterpret_cast<uint4*>(call.Rows(source, call.me) + staged * partial_bytes);
    ReduceRow<kType, kExact, kWeighted>(rows, vectors, entries, weight, out);
    if (params.d_weights != nullptr && entries.row >= 0) {
      auto* sent = reinterpret_cast<float*>(call.Entries(source, call.me));
      sent[int64_t{staged} * params.sizes.top_k + entries.slot] = params.d_weights[entries.row];
    }
    __syncwarp();
    if (lane == 0) StoreReleaseSys(call.Ready(source, call.me) + staged, call.tag);
  }
}

// One token's sum over ranks in order; lane r holds the staged row of rank r (or -1), lane i the
// i-th row that this rank keeps itself.
struct TokenParts {
  uint32_t ranks;
  int32_t staged;
  int32_t row;
  float weight;
  int count;
};

// A lane's part of a partial sum as it travels: in the row type, or in f32.
template <RowType kType, bool kExact>
struct Partial {
  using E = Element<kExact ? RowType::kF32 : kType>;
  static constexpr int kWords = Element<kType>::kPerVector / E::kPerVector;
  uint4 words[kVectors][kWords];

  __device__ void Load(const uint4* partial, int vectors, int base) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = base + u * 32 + static_cast<int>(threadIdx.x % 32);
      if (index >= vectors) continue;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[u][i] = LoadShared(partial + int64_t{index} * kWords + i);
      }
    }
  }
  // Rounds as a partial sum that travels is rounded.
  __device__ void Round(const Sums<kType>& sums) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[u][i] = E::Pack(&sums[u][i * E::kPerVector]);
    }
  }
  __device__ void AddTo(Sums<kType>& sums) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float x[E::kPerVector];
        E::Unpack(words[u][i], x);
#pragma unroll
        for (int j = 0; j < E::kPerVector; ++j) {
          float& sum = sums[u][i * E::kPerVector + j];
          sum = __fadd_rn(sum, x[j]);
        }
      }
    }
  }
};

template <RowType kType, bool kExact, bool kWeighted>
__device__ void SumToken(const Call& call, const CombineParams& params, const TokenParts& parts,
                         uint4* out) {
  using E = Element<kType>;
  constexpr int kRanks = kExact ? kBatch / 2 : kBatch;
  const int lane = threadIdx.x % 32;
  const int vectors = params.row_bytes / 16;
  const int64_t partial_bytes = kExact ? int64_t{params.sizes.width} * 4 : params.row_bytes;
  const auto load = [&](int rank, int64_t staged, int base, Partial<kType, kExact>* partial) {
    const uint8_t* row = call.Rows(call.me, rank) + staged * partial_bytes;
    partial->Load(reinterpret_cast<const uint4*>(row), vectors, base);
  };
  for (int base = 0; base < vectors; base += 32 * kVectors) {
    Partial<kType, kExact> mine;
    Sums<kType> sums;
    Clear<kType>(sums);
    if ((parts.ranks >> call.me & 1) != 0) {
      AddLocalRows<kType, kWeighted>(static_cast<const uint4*>(params.rows), vectors, parts.row,
                                     parts.weight, parts.count, base, sums);
      mine.Round(sums);
      Clear<kType>(sums);
    }
    for (int start = 0; start < call.ranks; start += kRanks) {
      Partial<kType, kExact> partials[kRanks];
#pragma unroll
      for (int b = 0; b < kRanks; ++b) {
        const int rank = start + b;
        const int64_t staged = __shfl_sync(~0u, parts.staged, rank & 31);
        if (rank != call.me && rank < call.ranks && (parts.ranks >> rank & 1) != 0) {
          load(rank, staged, base, &partials[b]);
        }
      }
#pragma unroll
      for (int b = 0; b < kRanks; ++b) {
        const int rank = start + b;
        if (rank >= call.ranks || (parts.ranks >> rank & 1) == 0) continue;
        if (rank == call.me) {
          mine.AddTo(sums);
        } else {
          partials[b].AddTo(sums);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = base + u * 32 + lane;
      if (index < vectors) StoreVector(out + index, E::Pack(sums[u]));
    }
  }
}

// Gathers this rank's own rows of the token into the low lanes, in slot order.
__device__ inline void GatherOwnRows(const Call& call, const CombineParams& params, int32_t rank,
                                     int64_t slot, TokenParts* parts) {
  const int lane = threadIdx.x % 32;
  int32_t row = rank == call.me ? params.plan.dst_row[slot] : -1;
  if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(params.sizes.capacity)) row = -1;
  const uint32_t mine = __ballot_sync(~0u, row >= 0);
  parts->count = __popc(mine);
  const int from = __fns(mine, 0, lane + 1);
  parts->row = __shfl_sync(~0u, row, from & 31);
  if (lane >= parts->count) parts->row = -1;
  parts->weight = params.weights != nullptr && parts->row >= 0 ? params.weights[parts->row] : 1.0f;
}

__device__ inline void ReadWeightGrads(const Call& call, const CombineParams& params, int32_t rank,
                                       int64_t slot, int32_t staged) {
  const int lane = threadIdx.x % 32;
  const int32_t at = __shfl_sync(~0u, staged, rank & 31);
  if (lane >= params.sizes.top_k) return;
  float value = 0.0f;
  if (rank == call.me) {
    const int32_t row = params.plan.dst_row[slot];
    if (static_cast<uint32_t>(row) < static_cast<uint32_t>(params.sizes.capacity)) {
      value = params.d_weights[row];
    }
  } else if (rank >= 0 && at >= 0) {
    const auto* sent = reinterpret_cast<const float*>(call.Entries(call.me, rank));
    value = __ldcg(&sent[int64_t{at} * params.sizes.top_k + lane]);
  }
  params.d_topk_weights[slot] = value;
}

template <RowType kType, bool kExact, bool kWeighted>
__device__ void SumTokens(const Call& call, const CombineParams& params, const Pass& pass, int warp,
                          int warps) {
  const int lane = threadIdx.x % 32;
  const int32_t* table = StagedTable(call);
  auto* out = static_cast<uint8_t*>(params.tokens);
  for (int64_t token = pass.begin + warp; token < pass.end; token += warps) {
    TokenParts parts;
    parts.staged = lane < call.ranks ? __ldcg(&table[token * call.ranks + lane]) : -1;
    parts.ranks = __ballot_sync(~0u, parts.staged >= 0);
    const int64_t slot = token * params.sizes.top_k + lane;
    int32_t rank = lane < params.sizes.top_k ? params.plan.dst_rank[slot] : -1;
    if (rank >= call.ranks) rank = -1;
    GatherOwnRows(call, params, rank, slot, &parts);
    bool alive = true;
    if (parts.staged >= 0 && lane != call.me) {
      alive = AwaitWord(call, call.Ready(call.me, lane) + parts.staged, call.tag, lane);
    }
    if (!__all_sync(~0u, alive)) return;
    SumToken<kType, kExact, kWeighted>(call, params, parts,
                                       reinterpret_cast<uint4*>(out + token * params.row_bytes));
    if (params.d_weights != nullptr) ReadWeightGrads(call, params, rank, slot, parts.staged);
  }
}

template <RowType kType, bool kExact, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params, Pass pass, uint32_t nan) {
  __shared__ StagedIndexShared index;
  const Call call = BeginCall(params.group, params.name, params.op);
  const int warp_in_block = threadIdx.x / 32;
  const int sum_blocks = params.grid.sum_blocks;
  const int reduce_blocks = params.grid.reduce_blocks;
  if (!call.dead) {
    if (static_cast<int>(blockIdx.x) < sum_blocks) {
      if (IndexTokens(call, &index, params.plan.dst_rank, params.sizes.top_k, pass.begin, pass.end,
                      blockIdx.x, sum_blocks)) {
        SumTokens<kType, kExact, kWeighted>(
            call, params, pass, warp_in_block * sum_blocks + blockIdx.x, sum_blocks * kWarps);
      }
    } else {
      const int block = blockIdx.x - sum_blocks;
      SendPartials<kType, kExact, kWeighted>(
          call, params, pass, warp_in_block * reduce_blocks + block, reduce_blocks * kWarps);
    }
  }
  // All tokens, also after the second half failed: the first half's must not survive it.
  const Output outputs[] = {
      {params.tokens, int64_t{params.sizes.tokens} * params.row_bytes, nan},
      {params.d_topk_weights,
       params.d_topk_weights != nullptr ? int64_t{params.sizes.tokens} * params.sizes.top_k * 4 : 0,
       0x7FC00000u}};
  EndCall(call, outputs);
}

template <RowType kType, bool kExact>
cudaError_t LaunchPass(cudaStream_t stream, const CombineParams& params, const Pass& pass) {
  const int blocks = params.grid.reduce_blocks + params.grid.sum_blocks;
  const uint32_t nan = NanPattern(params.type);
  if (params.weights != nullptr) {
    CombineKernel<kType, kExact, true><<<blocks, kThreads, 0, stream>>>(params, pass, nan);
  } else {
    CombineKernel<kType, kExact, false><<<blocks, kThreads, 0, stream>>>(params, pass, nan);
  }
  return cudaGetLastError();
}

template <RowType kType>
cudaError_t LaunchPasses(cudaStream_t stream, const CombineParams& params) {
  const int32_t tokens = params.sizes.tokens;
  if (!params.exact || kType == RowType::kF32) {
    return LaunchPass<kType, false>(stream, params, {0, tokens, 0});
  }
  // From static sizes alone, so that every rank makes the same number of passes.
  if (int64_t{tokens} * params.sizes.width * 4 <= params.source_rows_bytes) {
    return LaunchPass<kType, true>(stream, params, {0, tokens, 0});
  }
  const int32_t half = (tokens + 1) / 2;
  const cudaError_t error = LaunchPass<kType, true>(stream, params, {0, half, 1});
  if (error != cudaSuccess) return error;
  return LaunchPass<kType, true>(stream, params, {half, tokens, 2});
}

}  // namespace

cudaError_t LaunchCombine(cudaStream_t stream, const CombineParams& params) {
  const CallSizes& sizes = params.sizes;
  if (sizes.top_k < 1 || sizes.top_k > kMaxTopK || sizes.tokens < 0 || params.row_bytes <= 0 ||
      params.row_bytes % 16 != 0 || params.grid.reduce_blocks < 1 || params.grid.sum_blocks < 1 ||
      params.grid.sum_blocks > kMaxBlocks ||
      (params.d_weights == nullptr) != (params.d_topk_weights == nullptr)) {
    return cudaErrorInvalidValue;
  }
  switch (params.type) {
    case RowType::kF32:
      return LaunchPasses<RowType::kF32>(stream, params);
    case RowType::kBF16:
      return LaunchPasses<RowType::kBF16>(stream, params);
    case RowType::kF16:
      return LaunchPasses<RowType::kF16>(stream, params);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace ep_runtime
