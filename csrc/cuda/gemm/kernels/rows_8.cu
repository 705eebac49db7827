// Kernels of 8-bit products whose output rows are the groups' rows.
#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr Instance kInstances[] = {EP_GEMM_ROWS_8(EP_MAKE_INSTANCE)};

}  // namespace

Instances Rows8Instances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
