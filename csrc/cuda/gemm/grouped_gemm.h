// Launches grouped matrix products.
#ifndef EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
#define EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_

#include <cuda_runtime.h>

#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {

// Returns the tuning that was fastest for these operands on an H200. Reads everything in `params`
// except pointers and tuning.
GemmTuning TunedGemm(const GroupedGemmParams& params);

// Launches the product, and more kernels for clear_slack and for rhs_copy. Returns
// cudaErrorInvalidValue if a limit of product.h does not hold.
cudaError_t LaunchGroupedGemm(cudaStream_t stream, GroupedGemmParams params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
