// Quantizes weights, and transposes them.
#include "cuda/gemm/copies/write_columns.cuh"
#include "cuda/rows/quantize.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/fp8.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// A thread converts one piece of every kRowsAtOnce-th row of its block.
constexpr int kBlockLanes = kTile / 8;
constexpr int kRowsAtOnce = kThreads / kBlockLanes;
constexpr int kParts = kTile / kRowsAtOnce;

using Params = QuantizeWeightsParams;

// Returns the largest finite magnitude of a block's pieces. Call this with whole blocks.
template <RowType kType>
__device__ __forceinline__ float BlockAmax(const Piece<kType>* part) {
  __shared__ uint32_t of_warps[2][kWarps];
  const auto over = [&](uint32_t size, int turn) {
    size = __reduce_max_sync(kAllLanes, size);
    if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = size;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) size = max(size, of_warps[turn][warp]);
    return size;
  };
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) largest = max(largest, part[i].Largest());
  largest = over(largest, 0);
  if (largest >= Magnitude<kType>::kInfinity) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) largest = max(largest, part[i].LargestFinite());
    largest = over(largest, 1);
  }
  return Magnitude<kType>::ToFloat(largest);
}

// blockIdx is (column block, row block, matrix * middle).
template <RowType kType, Fp8Format kFormat, bool kGiven>
__global__ void __launch_bounds__(kThreads) WeightsKernel(const __grid_constant__ Params p) {
  __shared__ uint4 tile[kTile * kTile / 16];
  const int matrix = blockIdx.z / p.middle, middle = blockIdx.z % p.middle;
  const int line = threadIdx.x / kBlockLanes, lane = threadIdx.x % kBlockLanes;
  const int row = blockIdx.y * kTile + line, column = blockIdx.x * kTile + lane * 8;
  const int64_t stride = static_cast<int64_t>(p.middle) * p.width;
  const int64_t first = (static_cast<int64_t>(matrix) * p.rows + row) * stride +
                        static_cast<int64_t>(middle) * p.width + column;
  const auto there = [&](int i) { return column < p.width && row + i * kRowsAtOnce < p.rows; };
  Piece<kType> part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    part[i].Clear();
    if (there(i)) part[i].Load(p.values, first + i * kRowsAtOnce * stride);
  }
  float scale;
  if constexpr (kGiven) {
    scale = __ldg(p.given_scale + matrix);
  } else {
    scale = Fp8<kFormat>::ScaleOf(BlockAmax<kType>(part), p.power_of_two);
    if (threadIdx.x == 0) {
      const int64_t block_row = static_cast<int64_t>(matrix) * gridDim.y + blockIdx.y;
      p.scale[(block_row * p.middle + middle) * gridDim.x + blockIdx.x] = scale;
    }
  }
  const float inverse = __frcp_rn(scale);
  auto* halves = reinterpret_cast<uint2*>(tile);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint2 bytes = Convert<kType, kFormat>(part[i], [=](int) { return inverse; });
    halves[gemm::StoredVector(line + i * kRowsAtOnce, lane / 2) * 2 + lane % 2] = bytes;
    if (there(i)) StorePiece(p.data, first + i * kRowsAtOnce * stride, bytes);
  }
  if (p.transposed == nullptr) return;
  __syncthreads();
  const int32_t top = blockIdx.y * kTile;
  uint8_t* plane = p.transposed + static_cast<int64_t>(blockIdx.z) * p.width * p.rows;
  gemm::WriteColumns({plane + top, p.rows, p.width, min(p.rows - top, kTile)}, blockIdx.x * kTile,
                     tile);
}

}  // namespace
}  // namespace rows

cudaError_t LaunchQuantizeWeights(cudaStream_t stream, const QuantizeWeightsParams& p) {
  const auto blocks = [](int64_t length) {
    return static_cast<unsigned>((length + kTile - 1) / kTile);
  };
  const int64_t matrices = static_cast<int64_t>(p.count) * p.middle;
  if (!rows::Aligned(p.values) || !rows::Aligned(p.transposed) || p.width <= 0 ||
      p.width % kQuantizedMultiple != 0 || p.rows <= 0 ||
      (p.transposed != nullptr && p.rows % kTransposedMultiple != 0) || matrices <= 0 ||
      matrices > rows::kMaxSlabs || blocks(p.rows) > static_cast<unsigned>(rows::kMaxSlabs) ||
      (p.given_scale == nullptr) == (p.scale == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(blocks(p.width), blocks(p.rows), static_cast<unsigned>(matrices));
  return rows::LaunchForFp8(p.type, p.format, [&](auto type, auto format) {
    constexpr RowType kType = decltype(type)::value;
    constexpr Fp8Format kFormat = decltype(format)::value;
    if (p.given_scale == nullptr) {
      rows::WeightsKernel<kType, kFormat, false><<<grid, rows::kThreads, 0, stream>>>(p);
    } else {
      rows::WeightsKernel<kType, kFormat, true><<<grid, rows::kThreads, 0, stream>>>(p);
    }
  });
}

}  // namespace cuda
}  // namespace ep_runtime
