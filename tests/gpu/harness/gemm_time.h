// Times of products in one run, next to each other.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_

namespace gemm_test {

// Times 16-bit products next to one group of the same work.
void TimeWide();
// Times 8-bit products next to bf16 ones.
void TimeNarrow();
// Times tf32 products next to bf16 ones.
void TimeTf32();

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_
