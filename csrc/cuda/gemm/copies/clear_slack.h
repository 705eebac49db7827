// Sets rows past the last group of every slab to zero.
#ifndef EP_RUNTIME_CUDA_GEMM_COPIES_CLEAR_SLACK_H_
#define EP_RUNTIME_CUDA_GEMM_COPIES_CLEAR_SLACK_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// `rows`: [num_slabs * groups.slab_rows, row_bytes], device; the address and row_bytes are
// multiples of 16.
cudaError_t LaunchClearSlack(cudaStream_t stream, const Groups& groups, int num_slabs, void* rows,
                             int64_t row_bytes, int processors);

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_COPIES_CLEAR_SLACK_H_
