// Kernels of weight gradients with tf32 operands.
#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr Instance kInstances[] = {EP_GEMM_WEIGHTS_32(EP_MAKE_INSTANCE)};

}  // namespace

Instances Weights32Instances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
