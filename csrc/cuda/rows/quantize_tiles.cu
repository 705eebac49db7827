// Quantizes rows with MX scales, along rows and across rows.
#include "cuda/rows/quantize.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/fp8.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A warp quantizes a tile of kMxTile rows and 64 columns: 8 lanes per row, 4 rows at a time.
constexpr int kMxLanes = 8;
constexpr int kMxRowsAtOnce = 32 / kMxLanes;
constexpr int kMxParts = kMxTile / kMxRowsAtOnce;
constexpr int kMxColumns = 8 * kMxLanes;

__device__ __forceinline__ uint8_t ExponentOf(float power_of_two) {
  return static_cast<uint8_t>(__float_as_uint(power_of_two) >> 23);
}

// Returns 1 / power_of_two exactly, up to 2^126.
__device__ __forceinline__ float InverseOf(float power_of_two) {
  return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

// Largest magnitudes of a lane's columns, word by word, over the rows of the warp's tile.
template <RowType kType>
struct ColumnMax {
  using M = Magnitude<kType>;
  uint32_t words[Piece<kType>::kWords];

  template <bool kFinite>
  __device__ void Of(const Piece<kType>* part) {
#pragma unroll
    for (int w = 0; w < Piece<kType>::kWords; ++w) {
      uint32_t size = 0;
#pragma unroll
      for (int i = 0; i < kMxParts; ++i) {
        const uint32_t word = part[i].words[w];
        size = M::Max(size, kFinite ? M::OfFinite(word) : M::Of(word));
      }
#pragma unroll
      for (int step = kMxLanes; step < 32; step *= 2) {
        size = M::Max(size, __shfl_xor_sync(kAllLanes, size, step));
      }
      words[w] = size;
    }
  }
  // Returns the amax of the lane's column i of eight.
  __device__ float Amax(int i) const {
    if (!M::kPacked) return M::ToFloat(words[i]);
    return M::ToFloat(words[i / 2] >> i % 2 * 16 & 0xFFFFu);
  }
  __device__ bool AllFinite() const {
    uint32_t size = 0;
#pragma unroll
    for (int w = 0; w < Piece<kType>::kWords; ++w) size = max(size, M::Single(words[w]));
    return size < M::kInfinity;
  }
};

template <RowType kType>
struct MxTile {
  int64_t row;  // first row, number among the rows of all slabs
  int column;   // first column of the lane
  bool inside;  // true: the lane's columns exist
  bool finite;  // true: all values of the warp are finite
  Piece<kType> part[kMxParts];

  __device__ int64_t RowAt(int i, int lane) const {
    return row + i * kMxRowsAtOnce + lane / kMxLanes;
  }
};

template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void AlongRows(const QuantizeMxParams& p, const MxTile<kType>& tile,
                                          int lane) {
  using M = Magnitude<kType>;
#pragma unroll
  for (int i = 0; i < kMxParts; ++i) {
    const Piece<kType>& part = tile.part[i];
    uint32_t size = tile.finite ? part.Largest() : part.LargestFinite();
#pragma unroll
    for (int step = 1; step < kMxTile / 8; step *= 2) {
      size = max(size, __shfl_xor_sync(kAllLanes, size, step));
    }
    const float scale = Fp8<kFormat>::ScaleOf(M::ToFloat(size), true);
    // With InverseOf the compiler would keep all parts in registers at once, and spill.
    const float inverse = __frcp_rn(scale);
    const uint2 bytes = Convert<kType, kFormat>(part, [=](int) { return inverse; });
    if (!tile.inside) continue;
    const int64_t row = tile.RowAt(i, lane);
    StorePiece(p.data, row * p.width + tile.column, bytes);
    if (tile.column % kMxTile == 0) {
      p.scale[row * (p.width / kMxTile) + tile.column / kMxTile] = ExponentOf(scale);
    }
  }
}

template <RowType kType, Fp8Format kFormat>
__device__ __forceinline__ void AcrossRows(const QuantizeMxParams& p, const MxTile<kType>& tile,
                                           const ColumnMax<kType>& largest, int lane) {
  float inverse[8];
  uint32_t exponents[2] = {0, 0};
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float scale = Fp8<kFormat>::ScaleOf(largest.Amax(c), true);
    inverse[c] = InverseOf(scale);
    exponents[c / 4] |= static_cast<uint32_t>(ExponentOf(scale)) << c % 4 * 8;
  }
  if (!tile.inside) return;
#pragma unroll
  for (int i = 0; i < kMxParts; ++i) {
    StorePiece(p.data_columns, tile.RowAt(i, lane) * p.width + tile.column,
               Convert<kType, kFormat>(tile.part[i], [&](int c) { return inverse[c]; }));
  }
  if (lane < kMxLanes) {
    StorePiece(p.scale_columns, tile.row / kMxTile * p.width + tile.column,
               make_uint2(exponents[0], exponents[1]));
  }
}

// blockIdx.y is the slab. Warps take tiles in turn; slack rows count as zeros. Three blocks per
// multiprocessor keep enough reads in flight; f32 needs too many registers for three.
template <RowType kType, Fp8Format kFormat>
__global__ void __launch_bounds__(kThreads, kType == RowType::kF32 ? 1 : 3)
    MxKernel(const __grid_constant__ QuantizeMxParams p) {
  const int slab = blockIdx.y, lane = threadIdx.x % 32;
  const int32_t used = SlabRows(p.groups, slab);
  const int64_t across = (p.width + kMxColumns - 1) / kMxColumns;
  const int64_t down = (used + kMxTile - 1) / kMxTile, tiles = down * across;
  const int64_t first = static_cast<int64_t>(slab) * p.groups.slab_rows;
  for (int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       number < tiles; number += static_cast<int64_t>(gridDim.x) * kWarps) {
    MxTile<kType> tile;
    tile.row = first + number / across * kMxTile;
    tile.column = static_cast<int>(number % across) * kMxColumns + lane % kMxLanes * 8;
    tile.inside = tile.column < p.width;
#pragma unroll
    for (int i = 0; i < kMxParts; ++i) {
      const int64_t row = tile.RowAt(i, lane);
      tile.part[i].Clear();
      if (tile.inside && row - first < used) {
        tile.part[i].Load(p.values, row * p.width + tile.column);
      }
    }
    ColumnMax<kType> largest;
    largest.template Of<false>(tile.part);
    tile.finite = __all_sync(kAllLanes, largest.AllFinite());
    if (!tile.finite) largest.template Of<true>(tile.part);
    AlongRows<kType, kFormat>(p, tile, lane);
    AcrossRows<kType, kFormat>(p, tile, largest, lane);
  }
  if (!p.clear_slack) return;
  const int64_t rest = first + down * kMxTile, end = first + p.groups.slab_rows;
  constexpr uint32_t kOne = 127;  // E8M0 for a scale of 1
  Fill(p.data, rest * p.width, end * p.width, 0);
  Fill(p.scale, rest * p.width / kMxTile, end * p.width / kMxTile, kOne);
  Fill(p.data_columns, rest * p.width, end * p.width, 0);
  Fill(p.scale_columns, rest * p.width / kMxTile, end * p.width / kMxTile, kOne);
}

constexpr int kMxBlocksPerProcessor = 9;

}  // namespace
}  // namespace rows

cudaError_t LaunchQuantizeMx(cudaStream_t stream, const QuantizeMxParams& p) {
  if (!rows::Fits(p.groups) || !rows::Aligned(p.values) || p.width <= 0 || p.width % kMxTile != 0 ||
      p.groups.slab_rows % kMxTile != 0) {
    return cudaErrorInvalidValue;
  }
  int processors = 0;
  const cudaError_t error = rows::Processors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t tiles = static_cast<int64_t>(p.groups.slab_rows / kMxTile) *
                        ((p.width + rows::kMxColumns - 1) / rows::kMxColumns);
  const int64_t useful = (tiles + rows::kWarps - 1) / rows::kWarps;
  const int64_t most =
      (processors * rows::kMxBlocksPerProcessor + p.groups.num_slabs - 1) / p.groups.num_slabs;
  const dim3 grid(static_cast<unsigned>(useful < most ? useful : most), p.groups.num_slabs);
  return rows::LaunchForFp8(p.type, p.format, [&](auto type, auto format) {
    rows::MxKernel<decltype(type)::value, decltype(format)::value>
        <<<grid, rows::kThreads, 0, stream>>>(p);
  });
}

}  // namespace cuda
}  // namespace ep_runtime
