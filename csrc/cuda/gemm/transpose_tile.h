// Who moves which bytes of a tile of 128 x 128 of them in shared memory; 256 threads.
#ifndef EP_RUNTIME_CUDA_GEMM_TRANSPOSE_TILE_H_
#define EP_RUNTIME_CUDA_GEMM_TRANSPOSE_TILE_H_

#ifdef __CUDACC__
#define EP_BOTH __host__ __device__
#else
#define EP_BOTH
#endif

namespace ep_runtime {
namespace cuda {
namespace gemm {

// Reading, turn 0 to 3: a thread takes one vector of 16 bytes of a line.
EP_BOTH constexpr int TileLine(int thread, int turn) { return turn * 32 + thread / 8; }
EP_BOTH constexpr int TileVector(int thread) { return thread % 8; }
// Where the vector lies in shared memory: a warp writes whole lines, and reads the same words of 8
// lines that are 16 apart, from 32 banks.
EP_BOTH constexpr int StoredVector(int line, int vector) {
  return line * 8 + (vector ^ line / 16 % 8);
}
EP_BOTH constexpr int StoredWord(int line, int word) {
  return 4 * StoredVector(line, word / 4) + word % 4;
}
// Writing: a thread takes four columns, one word, of 16 lines; eight threads a column's 128 bytes.
EP_BOTH constexpr int FirstLine(int thread) { return thread % 8 * 16; }
EP_BOTH constexpr int ColumnWord(int thread) { return thread / 8; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#undef EP_BOTH

#endif  // EP_RUNTIME_CUDA_GEMM_TRANSPOSE_TILE_H_
