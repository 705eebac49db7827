// Makes transposed copies of 8-bit values.
#include "cuda/gemm/copies/read_lines.cuh"
#include "cuda/gemm/copies/transpose.h"
#include "cuda/gemm/copies/write_columns.cuh"
#include "cuda/gemm/product/groups.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

static_assert(kSide == kPaddedTo, "a tile of rows is one group's");
constexpr int kThreads = kTileThreads;
constexpr int kBlocksPerProcessor = 4;  // some blocks read while others write
// Number of blocks that share a line of tiles. A block takes every kAcross-th tile, and finds the
// line's rows only once.
constexpr int kAcross = 8;

struct BytePlace {
  Lines lines;
  uint8_t* to;     // where the first column's values go
  int64_t pitch;   // bytes between starts of lines in `to`
  int32_t stored;  // values to write of each column
};

// All threads of a block transpose every kAcross-th tile of the lines that `place` names.
__device__ __forceinline__ void TransposeLines(const BytePlace& place) {
  __shared__ uint4 tile[kSide * kSide / 16];
  for (int32_t column = blockIdx.y * kSide; column < place.lines.width; column += kAcross * kSide) {
    ReadLines(place.lines, column, tile);
    __syncthreads();
    WriteColumns({place.to, place.pitch, place.lines.width, place.stored}, column, tile);
    __syncthreads();
  }
}

// blockIdx.x is the tile of lines, blockIdx.z the plane.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    TransposePlanes(const TransposedPlanes planes) {
  if (LeftOut(planes.wanted)) return;
  const int32_t first = blockIdx.x * kSide;
  const int64_t plane = static_cast<int64_t>(blockIdx.z) * planes.lines * planes.width;
  const int32_t lines = min(planes.lines - first, kSide);
  TransposeLines(
      {{planes.from + plane + static_cast<int64_t>(first) * planes.width, planes.width, lines},
       planes.to + plane + first,
       planes.lines,
       lines});
}

// blockIdx.x is the tile in the slab's part of a result line, blockIdx.z the slab.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    TransposeRows(const TransposedRows rows) {
  if (LeftOut(rows.wanted)) return;
  const int32_t at = blockIdx.x * kSide;
  const int slab = blockIdx.z;
  const Rows found = FindRowsAt(rows.groups, slab, at);
  if (found.size == 0) return;
  const int64_t line = PaddedSlabRows(rows.groups.slab_rows, rows.groups.groups_per_slab);
  TransposeLines(
      {{rows.from + static_cast<int64_t>(found.start) * rows.width, rows.width, found.size},
       rows.to + slab * line + at,
       rows.slabs * line,
       kSide});
}

dim3 Grid(int64_t lines, int32_t width, int32_t planes) {
  const int across = (width + kSide - 1) / kSide;
  return dim3(static_cast<unsigned>((lines + kSide - 1) / kSide),
              across < kAcross ? across : kAcross, planes);
}

}  // namespace

cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedPlanes& planes) {
  if (planes.lines % 16 != 0 || planes.width % 16 != 0) return cudaErrorInvalidValue;
  if (planes.planes == 0 || planes.lines == 0 || planes.width == 0) return cudaSuccess;
  TransposePlanes<<<Grid(planes.lines, planes.width, planes.planes), kThreads, 0, stream>>>(planes);
  return cudaGetLastError();
}

cudaError_t LaunchTranspose(cudaStream_t stream, const TransposedRows& rows) {
  if (rows.width % 16 != 0) return cudaErrorInvalidValue;
  const int64_t line = PaddedSlabRows(rows.groups.slab_rows, rows.groups.groups_per_slab);
  if (rows.slabs == 0 || line == 0 || rows.width == 0) return cudaSuccess;
  TransposeRows<<<Grid(line, rows.width, rows.slabs), kThreads, 0, stream>>>(rows);
  return cudaGetLastError();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
