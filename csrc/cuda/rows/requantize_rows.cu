// Quantizes 8-bit rows again, with scales across rows.
#include <cuda_pipeline_primitives.h>

#include "cuda/gemm/copies/read_lines.cuh"
#include "cuda/gemm/product/groups.cuh"
#include "cuda/rows/requantize_rows.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/fp8.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

using gemm::kSide;

constexpr int kThreads = gemm::kTileThreads;
constexpr int kBlocksPerProcessor = 3;
constexpr int kAcross = 4;  // blocks that share a line, few so that each has several tiles
constexpr int kLines = 16;  // lines of a thread; it has four columns
static_assert(kSide == kTile, "a tile is what shares a scale, either way");

// Finds values that are not finite. A byte of a word is finite unless all bits of kMask are set in
// the byte.
template <Fp8Format kFormat>
struct Exponents {
  static constexpr bool kWide = kFormat == Fp8Format::kE5M2;
  static constexpr uint32_t kMask = kWide ? 0x7C7C7C7Cu : 0x7F7F7F7Fu;
  static constexpr uint32_t kLowest = kWide ? 0x04040404u : 0x01010101u;
  // Bit 7 of a byte is set if the byte is not finite. Its other bits are undefined.
  __device__ static uint32_t AllSet(uint32_t word) { return (word & kMask) + kLowest; }
};

// A thread's part of a tile in shared memory: four columns of kLines lines.
template <Fp8Format kFormat>
class ThreadColumns {
 public:
  __device__ ThreadColumns(const uint4* tile, const float* factors) {
    const int first = gemm::FirstLine(threadIdx.x), word = gemm::ColumnWord(threadIdx.x);
    const auto* words = reinterpret_cast<const uint32_t*>(tile);
    constexpr auto kType = kFormat == Fp8Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
    uint32_t not_finite = 0;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const uint32_t four = words[gemm::StoredWord(first + i, word)];
      not_finite |= Exponents<kFormat>::AllSet(four);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto pair = static_cast<__nv_fp8x2_storage_t>(four >> 16 * half & 0xFFFFu);
        pairs_[i][half] = __half2(__nv_cvt_fp8x2_to_halfraw2(pair, kType));
      }
    }
#pragma unroll
    for (int i = 0; i < kLines; i += 4) {
      const float4 next = *reinterpret_cast<const float4*>(factors + first + i);
      factors_[i] = next.x;
      factors_[i + 1] = next.y;
      factors_[i + 2] = next.z;
      factors_[i + 3] = next.w;
    }
    finite_ = (not_finite & 0x80808080u) == 0;
  }

  // Returns the largest finite magnitude. The maximum over a line is taken before scaling, because
  // the scale does not change the order of the line's values.
  __device__ float Amax() {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const __half2 two = __hmax2(__habs2(pairs_[i][0]), __habs2(pairs_[i][1]));
      const float largest = __half2float(__hmax(__low2half(two), __high2half(two)));
      amax = fmaxf(amax, MultiplyFlushed(largest, factors_[i]));
    }
    finite_ = finite_ && amax < INFINITY;
    return finite_ ? amax : FiniteAmax();
  }

  // Quantizes to one vector of kLines bytes for each column. Call this after Amax.
  __device__ void Quantize(float inverse, uint4 (&out)[4]) const {
    uint32_t bytes[4][kLines / 4];
#pragma unroll
    for (int four = 0; four < kLines / 4; ++four) {
      float values[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) Widen(4 * four + i, values[i]);
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
  // Reads four values of a line, multiplied by the line's scale.
  __device__ void Widen(int line, float (&values)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 exact = __half22float2(pairs_[line][half]);
      values[2 * half] = MultiplyFlushed(exact.x, factors_[line]);
      values[2 * half + 1] = MultiplyFlushed(exact.y, factors_[line]);
    }
  }
  __device__ float FiniteAmax() const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      float values[4];
      Widen(i, values);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float size = fabsf(values[c]);
        amax = fmaxf(amax, size < INFINITY ? size : 0.0f);
      }
    }
    return amax;
  }
  __device__ uint32_t Four(const float (&values)[4], float inverse) const {
    using F = Fp8<kFormat>;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = MultiplyFlushed(values[i], inverse);
    uint32_t bytes = F::Pair(y[0], y[1]) | F::Pair(y[2], y[3]) << 16;
    if (finite_) return bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (isfinite(values[i])) continue;
      bytes = (bytes & ~(0xFFu << 8 * i)) | F::NotFinite(values[i]) << 8 * i;
    }
    return bytes;
  }

  __half2 pairs_[kLines][2];
  float factors_[kLines];
  bool finite_;  // true: all values are finite
};

// Returns the largest of all threads' values, which must not be negative. Call this with whole
// blocks.
__device__ __forceinline__ float BlockMax(float value, float* of_warps) {
  // The bits of non-negative floats, as integers, have the same order as the floats.
  const uint32_t size = __reduce_max_sync(kAllLanes, __float_as_uint(value));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = __uint_as_float(size);
  __syncthreads();
  float largest = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

// A tile that is being loaded to shared memory, and the scales of its rows.
struct StagedTile {
  uint4 tile[kSide * kSide / 16];
  float factors[kSide];

  // Begins the load. All threads call this; rows that do not exist are zeros.
  __device__ void Load(const RequantizeRowsParams& p, const gemm::Rows& found, int32_t column) {
    constexpr int kTurns = kSide * kSide / 16 / kThreads;
    const int32_t tiles = (p.width + kTile - 1) / kTile;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int line = gemm::TileLine(threadIdx.x, i), vector = gemm::TileVector(threadIdx.x);
      const int32_t at = column + vector * 16;
      const bool there = line < found.size && at < p.width;
      const int64_t row = found.start + static_cast<int64_t>(there ? line : 0);
      __pipeline_memcpy_async(&tile[gemm::StoredVector(line, vector)],
                              p.data + row * p.width + (there ? at : 0), 16, there ? 0 : 16);
    }
    if (threadIdx.x < kSide) {
      const bool there = static_cast<int>(threadIdx.x) < found.size;
      const int64_t row = found.start + static_cast<int64_t>(there ? threadIdx.x : 0);
      __pipeline_memcpy_async(&factors[threadIdx.x], p.scale + row * tiles + column / kTile, 4,
                              there ? 0 : 4);
    }
  }
};

// blockIdx.x is the tile in the slab's part of a result line, blockIdx.z the slab. The next tile is
// loaded while a tile is quantized.
template <Fp8Format kFormat>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    RequantizeRowsKernel(const __grid_constant__ RequantizeRowsParams p) {
  __shared__ StagedTile staged[2];
  __shared__ float of_warps[kThreads / 32];
  if (LeftOut(p.wanted)) return;
  const int32_t at = blockIdx.x * kSide;
  const int slab = blockIdx.z;
  const gemm::Rows found = gemm::FindRowsAt(p.groups, slab, at);
  if (found.size == 0) return;
  const int64_t line = gemm::PaddedSlabRows(p.groups.slab_rows, p.groups.groups_per_slab);
  const int64_t to = slab * line + at, pitch = p.slabs * line;
  const int32_t tiles = (p.width + kTile - 1) / kTile;
  const int32_t step = gridDim.y * kSide;
  int32_t first = blockIdx.y * kSide;
  staged[0].Load(p, found, first);
  __pipeline_commit();
  for (int turn = 0; first < p.width; first += step, turn ^= 1) {
    // The buffer is free, because all threads have synced since they read it.
    if (first + step < p.width) staged[turn ^ 1].Load(p, found, first + step);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    ThreadColumns<kFormat> columns(staged[turn].tile, staged[turn].factors);
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
