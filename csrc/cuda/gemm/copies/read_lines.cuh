// Reads a tile of 128 lines of 128 bytes from memory to shared memory.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_READ_LINES_CUH_
#define EP_RUNTIME_CUDA_GEMM_COPIES_READ_LINES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/copies/transpose_tile.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kSide = 128;  // bytes of a line, and number of lines
constexpr int kTileThreads = 256;

struct Lines {
  const uint8_t* from;  // first line
  int32_t width;        // bytes of a line
  int32_t count;        // lines that exist; the others read as zeros
};

// All kTileThreads threads call this. The tile is laid out as `transpose_tile.h` describes. The
// order of a line's 16-byte vectors depends on the line, so that a warp's reads of 16 lines each
// have no bank conflict.
__device__ __forceinline__ void ReadLines(const Lines& lines, int32_t column, uint4* tile) {
  constexpr int kTurns = kSide * kSide / 16 / kTileThreads;
  uint4 vectors[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int line = TileLine(threadIdx.x, i);
    const int32_t at = column + TileVector(threadIdx.x) * 16;
    vectors[i] = make_uint4(0, 0, 0, 0);
    if (line < lines.count && at < lines.width) {
      vectors[i] = __ldg(reinterpret_cast<const uint4*>(
          lines.from + static_cast<int64_t>(line) * lines.width + at));
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    tile[StoredVector(TileLine(threadIdx.x, i), TileVector(threadIdx.x))] = vectors[i];
  }
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_READ_LINES_CUH_
