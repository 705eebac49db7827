// Writes a tile of 128 x 128 bytes from shared to global memory; each column becomes a line.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_WRITE_COLUMNS_CUH_
#define EP_RUNTIME_CUDA_GEMM_COPIES_WRITE_COLUMNS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/copies/transpose_tile.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

struct Columns {
  uint8_t* to;    // where column 0 is written
  int64_t pitch;  // bytes between starts of lines in `to`, a multiple of 16
  int32_t count;  // columns of the whole array, a multiple of 4
  int32_t lines;  // lines of the tile to write, a multiple of 16
};

// 256 threads call this, each for four columns of 16 lines. `column` is the tile's first column.
// The tile is laid out as `transpose_tile.h` describes.
__device__ __forceinline__ void WriteColumns(const Columns& columns, int32_t column,
                                             const uint4* tile) {
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
  const int first_line = FirstLine(threadIdx.x);
  uint32_t transposed[4][4];
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    uint32_t lines[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      lines[i] = words[StoredWord(first_line + 4 * four + i, ColumnWord(threadIdx.x))];
    }
    const uint32_t low01 = __byte_perm(lines[0], lines[1], 0x5140);
    const uint32_t high01 = __byte_perm(lines[0], lines[1], 0x7362);
    const uint32_t low23 = __byte_perm(lines[2], lines[3], 0x5140);
    const uint32_t high23 = __byte_perm(lines[2], lines[3], 0x7362);
    transposed[0][four] = __byte_perm(low01, low23, 0x5410);
    transposed[1][four] = __byte_perm(low01, low23, 0x7632);
    transposed[2][four] = __byte_perm(high01, high23, 0x5410);
    transposed[3][four] = __byte_perm(high01, high23, 0x7632);
  }
  if (first_line >= columns.lines) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t at = column + 4 * ColumnWord(threadIdx.x) + i;
    if (at >= columns.count) continue;
    *reinterpret_cast<uint4*>(columns.to + at * columns.pitch + first_line) =
        make_uint4(transposed[i][0], transposed[i][1], transposed[i][2], transposed[i][3]);
  }
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_WRITE_COLUMNS_CUH_
