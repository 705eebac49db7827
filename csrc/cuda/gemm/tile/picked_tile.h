// Which of a tile's weights a thread of a warpgroup picks from shared memory for its registers.
//
// An instruction takes 64 columns of weights, 16 a warp, 8 contracted elements deep. They lie in
// two boxes of 32 columns, whose lines of 128 bytes are swizzled by 16-byte vectors.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_PICKED_TILE_H_
#define EP_RUNTIME_CUDA_GEMM_TILE_PICKED_TILE_H_

#ifdef __CUDACC__
#define EP_BOTH __host__ __device__
#else
#define EP_BOTH
#endif

namespace ep_runtime {
namespace cuda {
namespace gemm {

// The order of the columns is chosen so that a warp's reads meet no bank twice.
EP_BOTH constexpr int PickedBox(int thread) { return thread / 64; }
// `which` of the thread's two columns, inside of its box.
EP_BOTH constexpr int PickedColumn(int thread, int which) {
  return thread / 32 % 2 * 8 + thread % 32 / 4 / 4 * 16 + which * 4 + thread % 32 / 4 % 4;
}
// Value 0 to 3 that a thread holds: which column it is of, how deep.
EP_BOTH constexpr int PickedWhich(int value) { return value % 2; }
EP_BOTH constexpr int PickedDepth(int thread, int value) { return thread % 4 + value / 2 * 4; }

// Bytes from the box's first one.
EP_BOTH constexpr int SwizzledOffset(int line, int column) {
  return line * 128 + (column / 4 ^ line % 8) * 16 + column % 4 * 4;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#undef EP_BOTH

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_PICKED_TILE_H_
