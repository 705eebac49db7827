#ifndef EP_RUNTIME_TESTS_GPU_TIMING_H_
#define EP_RUNTIME_TESTS_GPU_TIMING_H_

#include <string>

namespace gpu_test {

// Times prepare, dispatch and combine next to the link's ceiling. Returns the number of wrong
// sampled rows. `what`: "time" for everything, "few" for few tokens, "warps" for dispatch's numbers
// of warps.
int TimeAll(int ranks, int gpus, const std::string& what);

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_TIMING_H_
