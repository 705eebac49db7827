#include <type_traits>

#include "cuda/rows/fp8.cuh"
#include "cuda/rows/quantize.h"
#include "cuda/rows/row_groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerProcessor = 8;
constexpr int kUnroll = 4;  // pieces of a lane on their way at once
// Lanes that share a tile, and pieces of a lane: fewer lanes would have to move less between them,
// and store less side by side.
constexpr int kTileLanes = 8;
constexpr int kTileParts = kTile / 8 / kTileLanes;
constexpr int kTilesAtOnce = 32 / kTileLanes;  // of a warp
constexpr int kTileUnroll = kUnroll / kTileParts;

__global__ void ClearKernel(float* values, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0.0f;
}

// The largest finite magnitude of a lane's part of a row.
template <RowType kType>
__device__ __forceinline__ uint32_t RowAmax(const AmaxParams& p, int64_t row, int lane) {
  const int pieces = p.width / 8;
  uint32_t largest = 0;
  for (int base = lane; base < pieces; base += 32 * kUnroll) {
    Piece<kType> part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + 32 * u;
      if (at < pieces) {
        part[u].Load(p.values, row * p.width + at * 8);
      } else {
        part[u].Clear();
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      uint32_t size = part[u].Largest();
      if (size >= Magnitude<kType>::kInfinity) size = part[u].LargestFinite();
      largest = max(largest, size);
    }
  }
  return largest;
}

// blockIdx.y: the slab. A warp has rows that follow each other, and so few groups.
template <RowType kType>
__global__ void __launch_bounds__(kThreads) AmaxKernel(const __grid_constant__ AmaxParams p) {
  __shared__ int32_t ends[kMaxGroupsPerSlab];
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
    // Bits of what is not negative are ordered as it is.
    atomicMax(reinterpret_cast<unsigned*>(p.amax + number % p.num_experts), __float_as_uint(amax));
  }
}

// Every lane of a tile gets the tile's amax.
template <RowType kType>
__device__ __forceinline__ float TileAmax(const Piece<kType>* part) {
  const auto over = [](uint32_t size) {
#pragma unroll
    for (int step = kTileLanes / 2; step > 0; step /= 2) {
      size = max(size, __shfl_xor_sync(kAllLanes, size, step));
    }
    return size;
  };
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kTileParts; ++i) largest = max(largest, part[i].Largest());
  largest = over(largest);
  if (__any_sync(kAllLanes, largest >= Magnitude<kType>::kInfinity)) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < kTileParts; ++i) largest = max(largest, part[i].LargestFinite());
    largest = over(largest);
  }
  return Magnitude<kType>::ToFloat(largest);
}

// Scales of its own for every tile. Called by whole warps. Not `there`: a row of zeros.
template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void QuantizeTiles(const QuantizeRowsParams& p, int64_t row, bool there,
                                              int lane) {
  const int pieces = p.width / 8;
  const int tiles = (p.width + kTile - 1) / kTile;
  for (int base = 0; base < tiles; base += kTilesAtOnce * kTileUnroll) {
    Piece<kType> part[kTileUnroll][kTileParts];
    const int first = base + lane / kTileLanes;
    const auto place = [&](int u, int i) {
      return ((first + u * kTilesAtOnce) * kTileParts + i) * kTileLanes + lane % kTileLanes;
    };
#pragma unroll
    for (int u = 0; u < kTileUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kTileParts; ++i) {
        if (there && place(u, i) < pieces) {
          part[u][i].Load(p.values, row * p.width + place(u, i) * 8);
        } else {
          part[u][i].Clear();
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTileUnroll; ++u) {
      if (base + u * kTilesAtOnce >= tiles) break;
      const int tile = first + u * kTilesAtOnce;
      const float scale = Fp8<kFormat>::ScaleOf(TileAmax<kType>(part[u]), p.power_of_two);
      const float inverse = __frcp_rn(scale);
      if (lane % kTileLanes == 0 && tile < tiles) p.tile_scale[row * tiles + tile] = scale;
#pragma unroll
      for (int i = 0; i < kTileParts; ++i) {
        const uint2 bytes = Convert<kType, kFormat>(part[u][i], [=](int) { return inverse; });
        if (place(u, i) < pieces) StorePiece(p.data, row * p.width + place(u, i) * 8, bytes);
      }
    }
  }
}

// By 1 / scale of the row's group. Not `there`: a row of zeros.
template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void ScaleRow(const QuantizeRowsParams& p, int64_t row, bool there,
                                         float inverse, int lane) {
  const int pieces = p.width / 8;
  for (int base = lane; base < pieces; base += 32 * kUnroll) {
    Piece<kType> part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + 32 * u;
      if (there && at < pieces) {
        part[u].Load(p.values, row * p.width + at * 8);
      } else {
        part[u].Clear();
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + 32 * u;
      if (at >= pieces) break;
      StorePiece(p.data, row * p.width + at * 8,
                 Convert<kType, kFormat>(part[u], [=](int) { return inverse; }));
    }
  }
}

// blockIdx.y: the slab. Rows are dealt to warps.
template <RowType kType, Fp8Format kFormat, bool kTiled>
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(const __grid_constant__ QuantizeRowsParams p) {
  __shared__ int32_t ends[kTiled ? 1 : kMaxGroupsPerSlab];
  const int slab = blockIdx.y, groups = p.groups.groups_per_slab;
  int32_t used;
  if constexpr (kTiled) {
    used = SlabRows(p.groups, slab);
  } else {
    GroupEnds(p.groups, slab, ends);
    used = ends[groups - 1];
  }
  const int32_t all = p.clear_slack ? p.groups.slab_rows : used;
  const int64_t first = static_cast<int64_t>(slab) * p.groups.slab_rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < all;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTiled) {
      QuantizeTiles<kType, kFormat>(p, first + row, row < used, lane);
    } else {
      float inverse = 1.0f;
      if (row < used) {
        const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
        inverse = __frcp_rn(__ldg(p.group_scale + static_cast<int64_t>(slab) * groups + group));
      }
      ScaleRow<kType, kFormat>(p, first + row, row < used, inverse, lane);
    }
  }
}

template <RowType kType>
cudaError_t LaunchRows(cudaStream_t stream, const QuantizeRowsParams& p, dim3 grid) {
  const auto launch = [&](auto format) {
    constexpr Fp8Format kFormat = decltype(format)::value;
    if (p.group_scale == nullptr) {
      QuantizeRowsKernel<kType, kFormat, true><<<grid, kThreads, 0, stream>>>(p);
    } else {
      QuantizeRowsKernel<kType, kFormat, false><<<grid, kThreads, 0, stream>>>(p);
    }
  };
  if (p.format == Fp8Format::kE4M3) {
    launch(std::integral_constant<Fp8Format, Fp8Format::kE4M3>{});
  } else {
    launch(std::integral_constant<Fp8Format, Fp8Format::kE5M2>{});
  }
  return cudaGetLastError();
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
  const cudaError_t error = rows::GridOf(p.groups, rows::kWarps, rows::kBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  rows::ClearKernel<<<1, rows::kThreads, 0, stream>>>(p.amax, p.num_experts);
  switch (p.type) {
    case RowType::kF32:
      rows::AmaxKernel<RowType::kF32><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    case RowType::kBF16:
      rows::AmaxKernel<RowType::kBF16><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    case RowType::kF16:
      rows::AmaxKernel<RowType::kF16><<<grid, rows::kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const QuantizeRowsParams& p) {
  if (!rows::FitsQuantize(p.groups, p.values, p.width) ||
      (p.group_scale == nullptr) == (p.tile_scale == nullptr)) {
    return cudaErrorInvalidValue;
  }
  dim3 grid;
  const cudaError_t error = rows::GridOf(p.groups, rows::kWarps, rows::kBlocksPerProcessor, &grid);
  if (error != cudaSuccess) return error;
  switch (p.type) {
    case RowType::kF32:
      return rows::LaunchRows<RowType::kF32>(stream, p, grid);
    case RowType::kBF16:
      return rows::LaunchRows<RowType::kBF16>(stream, p, grid);
    case RowType::kF16:
      return rows::LaunchRows<RowType::kF16>(stream, p, grid);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace ep_runtime
