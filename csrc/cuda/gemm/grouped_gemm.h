// Launches grouped matrix products.
#ifndef EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
#define EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_

#include <cuda_runtime.h>

#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {

// The tuning that measured best for these operands on an H200. Reads everything in `params` except
// pointers and tuning.
GemmTuning TunedGemm(const GroupedGemmParams& params);

// Makes one launch; one more with clear_slack, and one more with rhs_copy. cudaErrorInvalidValue: a
// limit of product.h does not hold.
cudaError_t LaunchGroupedGemm(cudaStream_t stream, GroupedGemmParams params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
