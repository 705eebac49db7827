#ifndef EP_RUNTIME_FFI_GROUPED_GEMM_FFI_CUDA_H_
#define EP_RUNTIME_FFI_GROUPED_GEMM_FFI_CUDA_H_

#include <cuda_runtime.h>

#include "ffi/call_frame.h"

namespace ep_runtime {

// Calls of no group: operands and a stream are all they need. What the tensor copies are told of an
// operand, its address included, is an argument of the kernel: XLA captures anew where it changes.
struct GroupedGemmAttributes {
  bool data_grad;    // not the forward product
  bool clear_slack;  // rows of no group get zeros
};
Status LaunchGroupedGemmCall(CallFrame frame, cudaStream_t stream,
                             const GroupedGemmAttributes& attributes);
Status LaunchGroupedGemmDwCall(CallFrame frame, cudaStream_t stream);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_GROUPED_GEMM_FFI_CUDA_H_
