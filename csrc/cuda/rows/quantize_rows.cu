// Quantizes rows with tensor scales or block scales.
#include "cuda/rows/quantize.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/fp8.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerProcessor = 32;
constexpr int kAmaxBlocksPerProcessor = 4;     // few, because a warp takes consecutive rows
constexpr int kUnroll = 4;                     // pieces that a lane loads at once
constexpr int kTileLanes = kTile / 8;          // lanes that share a tile
constexpr int kTilesAtOnce = 32 / kTileLanes;  // tiles of a warp
// The scales that a warp computes in a turn are neighbours and are stored at once.
constexpr int kTilesOfTurn = kTilesAtOnce * kUnroll;

__global__ void ClearKernel(float* values, int count, const int32_t* wanted) {
  if (LeftOut(wanted)) return;
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0.0f;
}

template <Fp8Format kFormat>
__global__ void ScalesKernel(const __grid_constant__ GroupScalesParams p) {
  if (LeftOut(p.wanted)) return;
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) {
    p.scale[i] = Fp8<kFormat>::ScaleOf(p.amax[i], false);
  }
}

// Loads a lane's pieces base, base + 32, ... of the row at `from`; pieces past the row's end are
// zeros.
template <RowType kType>
__device__ __forceinline__ void LoadPieces(const void* values, int64_t from, int base, int pieces,
                                           Piece<kType> (&part)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int at = base + 32 * u;
    if (at < pieces) {
      part[u].Load(values, from + at * 8);
    } else {
      part[u].Clear();
    }
  }
}

// Returns the largest finite magnitude of a lane's part of a row.
template <RowType kType>
__device__ __forceinline__ uint32_t RowAmax(const AmaxParams& p, int64_t row, int lane) {
  const int pieces = p.width / 8;
  uint32_t largest = 0;
  for (int base = lane; base < pieces; base += 32 * kUnroll) {
    Piece<kType> part[kUnroll];
    LoadPieces(p.values, row * p.width, base, pieces, part);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      uint32_t size = part[u].Largest();
      if (size >= Magnitude<kType>::kInfinity) size = part[u].LargestFinite();
      largest = max(largest, size);
    }
  }
  return largest;
}

// blockIdx.y is the slab. A warp has consecutive rows, which belong to few groups.
template <RowType kType>
__global__ void __launch_bounds__(kThreads) AmaxKernel(const __grid_constant__ AmaxParams p) {
  __shared__ int32_t ends[kMaxGroupsPerSlab];
  if (LeftOut(p.wanted)) return;
  const int slab = blockIdx.y, groups = p.groups.groups_per_slab;
  GroupEnds(p.groups, slab, ends);
  const int32_t used = ends[groups - 1];
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t each = (used + warps - 1) / warps;
  const int64_t end = min(warp * each + each, static_cast<int64_t>(used));
  for (int64_t row = warp * each; row < end;) {
    const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
    const int64_t last = min(end, static_cast<int64_t>(ends[group]));
    uint32_t largest = 0;
    for (; row < last; ++row) {
      const int64_t at = static_cast<int64_t>(slab) * p.groups.slab_rows + row;
      largest = max(largest, RowAmax<kType>(p, at, lane));
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane != 0) continue;
    const int64_t number = static_cast<int64_t>(slab) * groups + group;
    const float amax = Magnitude<kType>::ToFloat(largest);
    // The bits of non-negative floats, as integers, have the same order as the floats.
    atomicMax(reinterpret_cast<unsigned*>(p.amax + number % p.num_experts), __float_as_uint(amax));
  }
}

// Largest magnitudes of the tiles of a turn, in every lane of a tile. For 16-bit types a word has
// two tiles' magnitudes. Call this with whole warps.
template <RowType kType>
struct TileLargest {
  using M = Magnitude<kType>;
  static constexpr int kWords = M::kPacked ? kUnroll / 2 : kUnroll;
  uint32_t words[kWords];

  template <bool kFinite>
  __device__ void Of(const Piece<kType>* part) {
    const auto of = [&](int i) { return kFinite ? part[i].LargestFinite() : part[i].Largest(); };
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = M::kPacked ? of(2 * w) | of((2 * w + 1) % kUnroll) << 16 : of(w);
#pragma unroll
      for (int step = kTileLanes / 2; step > 0; step /= 2) {
        words[w] = M::Max(words[w], __shfl_xor_sync(kAllLanes, words[w], step));
      }
    }
  }
  __device__ bool AllFinite() const {
    uint32_t size = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) size = max(size, M::Single(words[w]));
    return size < M::kInfinity;
  }
  __device__ float Amax(int u) const {
    return M::ToFloat(M::kPacked ? words[u / 2 % kWords] >> u % 2 * 16 & 0xFFFFu
                                 : words[u % kWords]);
  }
};

// Quantizes with a scale for every tile. Call this with whole warps.
template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void QuantizeTiles(const QuantizeRowsParams& p, int64_t row, int lane) {
  const int pieces = p.width / 8;
  const int tiles = (p.width + kTile - 1) / kTile;
  const int64_t at = row * (p.packed ? p.width + 4 * tiles : p.width);
  float* scales =
      p.packed ? reinterpret_cast<float*>(p.data + at + p.width) : p.tile_scale + row * tiles;
  for (int base = 0; base < tiles; base += kTilesOfTurn) {
    Piece<kType> part[kUnroll];
    const auto place = [&](int u) { return base * kTileLanes + u * 32 + lane; };
    LoadPieces(p.values, row * p.width, place(0), pieces, part);
    TileLargest<kType> largest;
    largest.template Of<false>(part);
    if (!__all_sync(kAllLanes, largest.AllFinite())) largest.template Of<true>(part);
    // One division and one inverse for every tile, instead of one in every lane.
    float amax = largest.Amax(0);
#pragma unroll
    for (int u = 1; u < kUnroll; ++u) {
      if (lane % kUnroll == u) amax = largest.Amax(u);
    }
    const float scale = Fp8<kFormat>::ScaleOf(amax, p.power_of_two);
    const float inverses = __frcp_rn(scale);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const float inverse = __shfl_sync(kAllLanes, inverses, lane / kTileLanes * kTileLanes + u);
      const uint2 bytes = Convert<kType, kFormat>(part[u], [=](int) { return inverse; });
      if (place(u) < pieces) StorePiece(p.data, at + place(u) * 8, bytes);
    }
    const int tile = base + lane % kTileLanes * kTilesAtOnce + lane / kTileLanes;
    if (lane % kTileLanes < kUnroll && tile < tiles) scales[tile] = scale;
  }
}

// Quantizes by 1 / scale of the row's group.
template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void ScaleRow(const QuantizeRowsParams& p, int64_t row, float inverse,
                                         int lane) {
  const int pieces = p.width / 8;
  for (int base = lane; base < pieces; base += 32 * kUnroll) {
    Piece<kType> part[kUnroll];
    LoadPieces(p.values, row * p.width, base, pieces, part);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + 32 * u;
      if (at >= pieces) break;
      StorePiece(p.data, row * p.width + at * 8,
                 Convert<kType, kFormat>(part[u], [=](int) { return inverse; }));
    }
  }
}

// blockIdx.y is the slab. Warps take the rows in turn.
template <RowType kType, Fp8Format kFormat, bool kTiled>
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(const __grid_constant__ QuantizeRowsParams p) {
  __shared__ int32_t ends[kTiled ? 1 : kMaxGroupsPerSlab];
  if (LeftOut(p.wanted)) return;
  const int slab = blockIdx.y, groups = p.groups.groups_per_slab;
  int32_t used;
  if constexpr (kTiled) {
    used = SlabRows(p.groups, slab);
  } else {
    GroupEnds(p.groups, slab, ends);
    used = ends[groups - 1];
  }
  const int64_t first = static_cast<int64_t>(slab) * p.groups.slab_rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < used;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTiled) {
      QuantizeTiles<kType, kFormat>(p, first + row, lane);
    } else {
      const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
      const float scale = __ldg(p.group_scale + static_cast<int64_t>(slab) * groups + group);
      ScaleRow<kType, kFormat>(p, first + row, __frcp_rn(scale), lane);
    }
  }
  if (!p.clear_slack) return;
  const int64_t rest = first + used, end = first + p.groups.slab_rows;
  Fill(p.data, rest * p.width, end * p.width, 0);
  if constexpr (kTiled) {
    const int tiles = (p.width + kTile - 1) / kTile;
    for (int64_t i = rest * tiles + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         i < end * tiles; i += static_cast<int64_t>(gridDim.x) * kThreads) {
      p.tile_scale[i] = 1.0f;
    }
  }
}

bool FitsQuantize(const RowGroups& groups, const void* values, int32_t width) {
  return Fits(groups) && groups.groups_per_slab > 0 && Aligned(values) && width > 0 &&
         width % kQuantizedMultiple == 0;
}

}  // namespace
}  // namespace rows

cudaError_t LaunchGroupAmax(cudaStream_t stream, const AmaxParams& p) {
  if (!rows::FitsQuantize(p.groups, p.values, p.width) || p.num_experts < 1) {
    return cudaErrorInvalidValue;
  }
  dim3 grid;
  const cudaError_t error =
      rows::GridOf(p.groups, rows::kWarps, rows::kAmaxBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  rows::ClearKernel<<<1, rows::kThreads, 0, stream>>>(p.amax, p.num_experts, p.wanted);
  return rows::LaunchForFloat(p.type, [&](auto type) {
    rows::AmaxKernel<decltype(type)::value><<<grid, rows::kThreads, 0, stream>>>(p);
  });
}

cudaError_t LaunchGroupScales(cudaStream_t stream, const GroupScalesParams& p) {
  if (p.format == Fp8Format::kE4M3) {
    rows::ScalesKernel<Fp8Format::kE4M3><<<1, rows::kThreads, 0, stream>>>(p);
  } else {
    rows::ScalesKernel<Fp8Format::kE5M2><<<1, rows::kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const QuantizeRowsParams& p) {
  if (!rows::FitsQuantize(p.groups, p.values, p.width) ||
      (p.group_scale != nullptr) + (p.tile_scale != nullptr) + p.packed != 1 ||
      (p.packed && p.clear_slack)) {
    return cudaErrorInvalidValue;
  }
  dim3 grid;
  const cudaError_t error = rows::GridOf(p.groups, rows::kWarps, rows::kBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  return rows::LaunchForFp8(p.type, p.format, [&](auto type, auto format) {
    constexpr RowType kType = decltype(type)::value;
    constexpr Fp8Format kFormat = decltype(format)::value;
    if (p.group_scale == nullptr) {
      rows::QuantizeRowsKernel<kType, kFormat, true><<<grid, rows::kThreads, 0, stream>>>(p);
    } else {
      rows::QuantizeRowsKernel<kType, kFormat, false><<<grid, rows::kThreads, 0, stream>>>(p);
    }
  });
}

}  // namespace cuda
}  // namespace ep_runtime
