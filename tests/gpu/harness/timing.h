#ifndef EP_RUNTIME_TESTS_GPU_TIMING_H_
#define EP_RUNTIME_TESTS_GPU_TIMING_H_

#include <string>

namespace gpu_test {

// Times prepare, dispatch and combine beside the link's ceiling; returns how many sampled rows are
// wrong. `what`: "time" for all, "few" for what few tokens take, "warps" for what changes with
// dispatch's warps.
int TimeAll(int ranks, int gpus, const std::string& what);

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_TIMING_H_
