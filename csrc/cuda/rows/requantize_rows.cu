#include "cuda/gemm/copies/read_lines.cuh"
#include "cuda/gemm/product/groups.cuh"
#include "cuda/rows/fp8.cuh"
#include "cuda/rows/requantize_rows.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

using gemm::kSide;

constexpr int kThreads = gemm::kTileThreads;
constexpr int kBlocksPerProcessor = 3;  // some read while others write
constexpr int kAcross = 8;              // of blocks beside each other in a line
constexpr int kLines = 16;              // of a thread, which has four columns
static_assert(kSide == kTile, "a tile is what shares a scale, either way");

// Four values of a line, by the line's scale.
template <Fp8Format kFormat>
__device__ __forceinline__ void Widen(uint32_t word, float factor, float (&values)[4]) {
  constexpr auto kType = kFormat == Fp8Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> 16 * half & 0xFFFFu);
    const float2 exact = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kType)));
    values[2 * half] = MultiplyFlushed(exact.x, factor);
    values[2 * half + 1] = MultiplyFlushed(exact.y, factor);
  }
}

// A thread's part of a tile in shared memory: four columns of kLines lines.
template <Fp8Format kFormat>
class ThreadColumns {
 public:
  __device__ ThreadColumns(const uint4* tile, const float* factors)
      : factors_(factors + gemm::FirstLine(threadIdx.x)) {
    const auto* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      words_[i] =
          words[gemm::StoredWord(gemm::FirstLine(threadIdx.x) + i, gemm::ColumnWord(threadIdx.x))];
    }
  }

  // The largest finite magnitude.
  __device__ float Amax() const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      float values[4];
      Widen<kFormat>(words_[i], factors_[i], values);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float size = fabsf(values[c]);
        amax = fmaxf(amax, size < INFINITY ? size : 0.0f);
      }
    }
    return amax;
  }

  // One vector of kLines bytes for each column.
  __device__ void Quantize(float inverse, uint4 (&out)[4]) const {
    uint32_t bytes[4][kLines / 4];
#pragma unroll
    for (int four = 0; four < kLines / 4; ++four) {
      float values[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Widen<kFormat>(words_[4 * four + i], factors_[4 * four + i], values[i]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float column[4] = {values[0][c], values[1][c], values[2][c], values[3][c]};
        bytes[c][four] = Four(column, inverse);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      out[c] = make_uint4(bytes[c][0], bytes[c][1], bytes[c][2], bytes[c][3]);
    }
  }

 private:
  __device__ static uint32_t Four(const float (&values)[4], float inverse) {
    using F = Fp8<kFormat>;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = MultiplyFlushed(values[i], inverse);
    uint32_t bytes = F::Pair(y[0], y[1]) | F::Pair(y[2], y[3]) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (isfinite(values[i])) continue;
      bytes = (bytes & ~(0xFFu << 8 * i)) | F::NotFinite(values[i]) << 8 * i;
    }
    return bytes;
  }

  const float* factors_;
  uint32_t words_[kLines];
};

// The largest of all threads' values, which are not negative; called by whole blocks.
__device__ __forceinline__ float BlockMax(float value, float* of_warps) {
  // Bits of what is not negative are ordered as it is.
  const uint32_t size = __reduce_max_sync(kAllLanes, __float_as_uint(value));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = __uint_as_float(size);
  __syncthreads();
  float largest = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

// blockIdx.x: tile of a slab's line in the result, .z: slab.
template <Fp8Format kFormat>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    RequantizeRowsKernel(const __grid_constant__ RequantizeRowsParams p) {
  __shared__ uint4 tile[kSide * kSide / 16];
  __shared__ float factors[kSide], of_warps[kThreads / 32];
  if (LeftOut(p.wanted)) return;
  const int32_t at = blockIdx.x * kSide;
  const int slab = blockIdx.z;
  const gemm::Rows found = gemm::FindRowsAt(p.groups, slab, at);
  if (found.size == 0) return;
  const int64_t line = gemm::PaddedSlabRows(p.groups.slab_rows, p.groups.groups_per_slab);
  const int64_t to = slab * line + at, pitch = p.slabs * line;
  const int32_t tiles = (p.width + kTile - 1) / kTile;
  const gemm::Lines lines{p.data + static_cast<int64_t>(found.start) * p.width, p.width,
                          found.size};
  for (int32_t first = blockIdx.y * kSide; first < p.width; first += kAcross * kSide) {
    gemm::ReadLines(lines, first, tile);
    if (threadIdx.x < kSide) {
      const int64_t row = found.start + static_cast<int64_t>(threadIdx.x);
      const bool there = static_cast<int>(threadIdx.x) < found.size;
      factors[threadIdx.x] = there ? __ldg(p.scale + row * tiles + first / kTile) : 0.0f;
    }
    __syncthreads();
    const ThreadColumns<kFormat> columns(tile, factors);
    const float amax = BlockMax(columns.Amax(), of_warps);
    const float scale = Fp8<kFormat>::ScaleOf(amax, p.power_of_two);
    uint4 out[4];
    columns.Quantize(__frcp_rn(scale), out);
    const int32_t column = first + 4 * gemm::ColumnWord(threadIdx.x);
    if (column < p.width) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        *reinterpret_cast<uint4*>(p.out + (column + c) * pitch + to +
                                  gemm::FirstLine(threadIdx.x)) = out[c];
      }
    }
    if (threadIdx.x == 0) p.out_scale[to / kTile * tiles + first / kTile] = scale;
    __syncthreads();
  }
}

}  // namespace
}  // namespace rows

cudaError_t LaunchRequantizeRows(cudaStream_t stream, const RequantizeRowsParams& p) {
  if (p.width % 16 != 0) return cudaErrorInvalidValue;
  const int64_t line = gemm::PaddedSlabRows(p.groups.slab_rows, p.groups.groups_per_slab);
  if (p.slabs == 0 || line == 0 || p.width == 0) return cudaSuccess;
  const int across = (p.width + rows::kSide - 1) / rows::kSide;
  const dim3 grid(static_cast<unsigned>(line / rows::kSide),
                  across < rows::kAcross ? across : rows::kAcross, p.slabs);
  if (p.format == Fp8Format::kE4M3) {
    rows::RequantizeRowsKernel<Fp8Format::kE4M3><<<grid, rows::kThreads, 0, stream>>>(p);
  } else {
    rows::RequantizeRowsKernel<Fp8Format::kE5M2><<<grid, rows::kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
