// The copies that go before products: transposed 8-bit values and f32 rows, and values times
// their scales.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_

namespace gemm_test {

// Byte by byte against the host. Returns how many cases are wrong, and adds their number to `all`.
int CheckCopies(int* all);
// Beside a plain copy of as many bytes.
void TimeCopies();

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_COPIES_H_
