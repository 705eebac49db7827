// First products that also compute the activation, against two launches.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_ACTIVATION_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_ACTIVATION_H_

#include "gemm_case.h"

namespace gemm_test {

// Says where results first differ; empty: nowhere, or the case's product cannot have an activation.
std::string DifferActivated(const GemmCase& c, const Data& data);

// Times both with the sizes of layers.
void TimeActivated();

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_ACTIVATION_H_
