#ifndef EP_RUNTIME_TESTS_GPU_TIMING_H_
#define EP_RUNTIME_TESTS_GPU_TIMING_H_

namespace gpu_test {

// Times prepare, dispatch and combine beside the link's ceiling; returns how many sampled rows are
// wrong.
int TimeAll(int ranks, int gpus, bool quick);

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_TIMING_H_
