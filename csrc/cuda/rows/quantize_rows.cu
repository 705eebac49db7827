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
constexpr int kUnroll = 4;             // pieces of a lane on their way at once
constexpr int kTileLanes = kTile / 8;  // that share a tile

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

// Every lane of a tile has the tile's amax.
template <RowType kType>
__device__ __forceinline__ float TileAmax(const Piece<kType>& part) {
  const auto over = [](uint32_t size) {
#pragma unroll
    for (int step = kTileLanes / 2; step > 0; step /= 2) {
      size = max(size, __shfl_xor_sync(kAllLanes, size, step));
    }
    return size;
  };
  uint32_t largest = over(part.Largest());
  if (__any_sync(kAllLanes, largest >= Magnitude<kType>::kInfinity)) {
    largest = over(part.LargestFinite());
  }
  return Magnitude<kType>::ToFloat(largest);
}

// Called by whole warps. `inverse`: 1 / scale of the group, where tiles have none of their own.
// Not `there`: a row of zeros.
template <RowType kType, Fp8Format kFormat, bool kTiled>
__device__ __forceinline__ void QuantizeRow(const QuantizeRowsParams& p, int64_t row, bool there,
                                            float inverse, int lane) {
  const int pieces = p.width / 8;
  const int tiles = (p.width + kTile - 1) / kTile;
  for (int base = 0; base < pieces; base += 32 * kUnroll) {
    Piece<kType> part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + 32 * u + lane;
      if (there && at < pieces) {
        part[u].Load(p.values, row * p.width + at * 8);
      } else {
        part[u].Clear();
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + 32 * u >= pieces) break;
      const int at = base + 32 * u + lane;
      if (kTiled) {
        const float scale = Fp8<kFormat>::ScaleOf(TileAmax(part[u]), p.power_of_two);
        inverse = __frcp_rn(scale);
        if (lane % kTileLanes == 0 && at < pieces) {
          p.tile_scale[row * tiles + at / kTileLanes] = scale;
        }
      }
      const uint2 bytes = Convert<kType, kFormat>(part[u], [=](int) { return inverse; });
      if (at < pieces) StorePiece(p.data, row * p.width + at * 8, bytes);
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
    float inverse = 1.0f;
    if (!kTiled && row < used) {
      const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
      inverse = __frcp_rn(__ldg(p.group_scale + static_cast<int64_t>(slab) * groups + group));
    }
    QuantizeRow<kType, kFormat, kTiled>(p, first + row, row < used, inverse, threadIdx.x % 32);
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
