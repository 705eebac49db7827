// Times of products beside each other, all in one run.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_

namespace gemm_test {

// 16-bit products beside one group of the same work.
void TimeWide();
// 8-bit products beside bf16 ones.
void TimeNarrow();
// tf32 products beside bf16 ones.
void TimeTf32();

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_TIME_H_
