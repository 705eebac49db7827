// Kernels of all products of 16-bit operands.
#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr Instance kInstances[] = {EP_GEMM_16(EP_MAKE_INSTANCE)};

}  // namespace

Instances Products16Instances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
