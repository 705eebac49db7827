// The copies that products need: transposed 8-bit values and f32 rows, and values times their
// scales.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_

namespace gemm_test {

// Checks copies byte by byte against the host. Returns the number of wrong cases, and adds the
// number of all cases to `all`.
int CheckCopies(int* all);

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_
