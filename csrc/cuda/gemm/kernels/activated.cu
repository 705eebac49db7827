// Kernels of first products that also compute the activation.
#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr Instance kInstances[] = {EP_GEMM_ACTIVATED(EP_MAKE_ACTIVATED)};

}  // namespace

Instances ActivatedInstances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
