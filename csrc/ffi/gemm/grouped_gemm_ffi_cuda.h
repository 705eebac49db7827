#ifndef EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_
#define EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_

#include <cuda_runtime.h>

#include "ffi/call_frame.h"
#include "ffi/target.h"

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

// Of f32 operands, which are rounded to tf32.
extern XLA_FFI_Handler* const kTf32GroupedGemmDwV1;

// Of 8-bit operands, in fp8_gemm_ffi_cuda.cc; and what makes operands for products.
extern XLA_FFI_Handler* const kFp8GroupedGemmV1;
extern XLA_FFI_Handler* const kFp8GroupedGemmDwV1;
extern XLA_FFI_Handler* const kTransposeRowsV1;
extern XLA_FFI_Handler* const kTransposeWeightsV1;
extern XLA_FFI_Handler* const kDequantizeV1;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_
