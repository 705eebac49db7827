// Maps 256 threads to the parts of a tile that they transpose: 128 lines of 128 bytes in shared
// memory.
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

// Reading, turns 0 to 3: a thread takes one 16-byte vector of a line.
EP_BOTH constexpr int TileLine(int thread, int turn) { return turn * 32 + thread / 8; }
EP_BOTH constexpr int TileVector(int thread) { return thread % 8; }
// Index of a vector in shared memory, without bank conflicts: a warp writes whole lines, and
// its reads of the same words of 8 lines, 16 lines apart, use 32 different banks.
EP_BOTH constexpr int StoredVector(int line, int vector) {
  return line * 8 + (vector ^ line / 16 % 8);
}
EP_BOTH constexpr int StoredWord(int line, int word) {
  return 4 * StoredVector(line, word / 4) + word % 4;
}
// Writing: a thread takes four columns (one word) of 16 lines; eight threads write a column's 128
// bytes.
EP_BOTH constexpr int FirstLine(int thread) { return thread % 8 * 16; }
EP_BOTH constexpr int ColumnWord(int thread) { return thread / 8; }

// For f32 values. Reading: a thread takes a vector of each of four lines, and transposes these 4 x
// 4 values.
EP_BOTH constexpr int FloatVector(int thread) { return thread % 8; }
EP_BOTH constexpr int FloatFour(int thread) { return thread / 8; }
// Index of the vector with a column's values in four lines, without bank conflicts: 8
// neighbouring threads write columns that are 4 apart, or read one column, and use 32 different
// banks.
EP_BOTH constexpr int TransposedVector(int column, int four) {
  return column * 32 + (four ^ column / 4);
}
// Writing, turns 0 to 3: a warp takes one column.
EP_BOTH constexpr int FloatColumn(int thread, int turn) { return thread / 32 + turn * 8; }
EP_BOTH constexpr int WrittenFour(int thread) { return thread % 32; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#undef EP_BOTH

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_TRANSPOSE_TILE_H_
