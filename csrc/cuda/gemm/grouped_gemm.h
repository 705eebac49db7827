#ifndef EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
#define EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_

#include <cuda_runtime.h>

#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {

// What measured best for these operands on an H200; reads everything of `params` but pointers and
// tuning.
GemmTuning TunedGemm(const GroupedGemmParams& params);

// One launch, two with clear_slack or a pair's copies, three with both. cudaErrorInvalidValue: a
// limit of product.h does not hold.
cudaError_t LaunchGroupedGemm(cudaStream_t stream, GroupedGemmParams params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
