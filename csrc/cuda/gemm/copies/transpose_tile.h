// Who moves what of a tile in shared memory, 128 lines of 128 bytes; 256 threads.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_TILE_H_
#define EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_TILE_H_

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

// Of f32 values. Reading, a thread takes one vector of four lines, and transposes them.
EP_BOTH constexpr int FloatVector(int thread) { return thread % 8; }
EP_BOTH constexpr int FloatFour(int thread) { return thread / 8; }
// Where four lines' values of a column lie: 8 threads beside each other write those of columns that
// are 4 apart and read those of one column, from 32 banks both times.
EP_BOTH constexpr int TransposedVector(int column, int four) {
  return column * 32 + (four ^ column / 4);
}
// Writing, turn 0 to 3: a warp takes one column.
EP_BOTH constexpr int FloatColumn(int thread, int turn) { return thread / 32 + turn * 8; }
EP_BOTH constexpr int WrittenFour(int thread) { return thread % 32; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#undef EP_BOTH

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_TILE_H_
