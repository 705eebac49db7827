// Makes transposed copies of f32 values.
#include "cuda/gemm/copies/transpose.h"
#include "cuda/gemm/copies/transpose_tile.h"
#include "cuda/gemm/product/groups.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr int kLines = kPaddedTo;       // lines of a tile, which belong to one group
constexpr int kColumns = 32;            // columns of a tile
constexpr int kThreads = 256;           // each transposes 4 x 4 values
constexpr int kBlocksPerProcessor = 5;  // some blocks read while others write
// Number of blocks that share a line of tiles. A block takes every kAcross-th tile, and finds the
// line's rows only once.
constexpr int kAcross = 8;

struct FloatPlace {
  const float* from;  // the tile's first line
  float* to;          // where the first column's values go
  int64_t pitch;      // values between starts of lines in `to`
  int32_t width;      // values of a line of `from`
  int32_t lines;      // lines that exist; the others read as zeros
  int32_t stored;     // values to write of each column
};

__device__ __forceinline__ void ReadTile(const FloatPlace& place, int32_t column, float4* tile) {
  const int vector = FloatVector(threadIdx.x);
  const int four = FloatFour(threadIdx.x);
  const int32_t at = column + 4 * vector;
  float4 lines[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = 4 * four + i;
    lines[i] = make_float4(0, 0, 0, 0);
    if (line < place.lines && at < place.width) {
      lines[i] = __ldg(reinterpret_cast<const float4*>(
          place.from + static_cast<int64_t>(line) * place.width + at));
    }
  }
  tile[TransposedVector(4 * vector, four)] =
      make_float4(lines[0].x, lines[1].x, lines[2].x, lines[3].x);
  tile[TransposedVector(4 * vector + 1, four)] =
      make_float4(lines[0].y, lines[1].y, lines[2].y, lines[3].y);
  tile[TransposedVector(4 * vector + 2, four)] =
      make_float4(lines[0].z, lines[1].z, lines[2].z, lines[3].z);
  tile[TransposedVector(4 * vector + 3, four)] =
      make_float4(lines[0].w, lines[1].w, lines[2].w, lines[3].w);
}

// A warp writes one column's values at a time.
__device__ __forceinline__ void WriteTile(const FloatPlace& place, int32_t column,
                                          const float4* tile) {
  const int four = WrittenFour(threadIdx.x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int inside = FloatColumn(threadIdx.x, i);
    if (column + inside >= place.width || 4 * four >= place.stored) continue;
    *reinterpret_cast<float4*>(place.to + (column + inside) * place.pitch + 4 * four) =
        tile[TransposedVector(inside, four)];
  }
}

// All threads of a block transpose every kAcross-th tile of the lines that `place` names.
__device__ __forceinline__ void TransposeLines(const FloatPlace& place) {
  __shared__ float4 tile[kLines / 4 * kColumns];
  for (int32_t column = blockIdx.y * kColumns; column < place.width; column += kAcross * kColumns) {
    ReadTile(place, column, tile);
    __syncthreads();
    WriteTile(place, column, tile);
    __syncthreads();
  }
}

// blockIdx.x is the tile in the slab's part of a result line, blockIdx.z the slab.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    TransposeRows(const TransposedFloatRows rows) {
  if (LeftOut(rows.wanted)) return;
  const int32_t at = blockIdx.x * kLines;
  const int slab = blockIdx.z;
  const Rows found = FindRowsAt(rows.groups, slab, at);
  if (found.size == 0) return;
  const int64_t line = PaddedSlabRows(rows.groups.slab_rows, rows.groups.groups_per_slab);
  TransposeLines({rows.from + static_cast<int64_t>(found.start) * rows.width,
                  rows.to + slab * line + at, rows.slabs * line, rows.width, found.size, kLines});
}

// blockIdx.x is the tile of lines, blockIdx.z the plane.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    TransposePlanes(const TransposedFloatPlanes planes) {
  if (LeftOut(planes.wanted)) return;
  const int32_t first = blockIdx.x * kLines;
  const int64_t plane = blockIdx.z, pitch = planes.lines;
  const int32_t lines = min(planes.lines - first, kLines);
  TransposeLines({planes.from + (plane * planes.lines + first) * planes.width,
                  planes.to + plane * planes.to_lines * pitch + first, pitch, planes.width, lines,
                  lines});
}

dim3 Grid(int64_t lines, int32_t width, int32_t planes) {
  const int across = (width + kColumns - 1) / kColumns;
  return dim3(static_cast<unsigned>((lines + kLines - 1) / kLines),
              across < kAcross ? across : kAcross, planes);
}

}  // namespace

cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatRows& rows) {
  if (rows.width % 4 != 0) return cudaErrorInvalidValue;
  const int64_t line = PaddedSlabRows(rows.groups.slab_rows, rows.groups.groups_per_slab);
  if (rows.slabs == 0 || line == 0 || rows.width == 0) return cudaSuccess;
  TransposeRows<<<Grid(line, rows.width, rows.slabs), kThreads, 0, stream>>>(rows);
  return cudaGetLastError();
}

cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedFloatPlanes& planes) {
  if (planes.lines % 4 != 0 || planes.width % 4 != 0) return cudaErrorInvalidValue;
  if (planes.planes == 0 || planes.lines == 0 || planes.width == 0) return cudaSuccess;
  TransposePlanes<<<Grid(planes.lines, planes.width, planes.planes), kThreads, 0, stream>>>(planes);
  return cudaGetLastError();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
