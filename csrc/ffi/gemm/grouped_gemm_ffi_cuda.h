// Handlers of grouped products, and functions that read their operands.
#ifndef EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_
#define EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/grouped_gemm.h"
#include "ffi/call_frame.h"
#include "ffi/target.h"

namespace ep_runtime {

// Launches a product. Tensor maps contain the operands' addresses and are arguments of the kernel,
// so XLA captures the graph again when an address changes.
Status LaunchGemm(const CallFrame& frame, cudaStream_t stream, cuda::GroupedGemmParams params);

inline void SetFeatures(int64_t experts, int64_t in, int64_t out, cuda::GroupedGemmParams* params) {
  params->num_experts = static_cast<int32_t>(experts);
  params->in_features = static_cast<int32_t>(in);
  params->out_features = static_cast<int32_t>(out);
}

// Returns the number of results of a call that computes a weight gradient: two for a pair.
inline size_t CountWeightGrads(const CallFrame& frame) { return frame.rets.size() == 2 ? 2 : 1; }
// Reads the result [G, in, out], or for a pair two [G, in, out / 2], and sets the features.
Status ReadWeightGrads(const CallFrame& frame, int64_t in, int64_t out,
                       cuda::GroupedGemmParams* params);

// Reads bias [G, N'], or [0, 0] if there is none.
Status ReadBias(const Operand& bias, cuda::GroupedGemmParams* params);
// Returns the number of rows, with padding, in a transposed copy of all slabs.
int64_t PaddedRows(const cuda::GroupedGemmParams& params);

extern XLA_FFI_Handler* const kGroupedGemmV1;
extern XLA_FFI_Handler* const kGroupedGemmDwV1;
// For f32 operands, which are rounded to tf32.
extern XLA_FFI_Handler* const kTf32GroupedGemmDwV1;

// For 8-bit operands, in fp8_gemm_ffi_cuda.cc; the last four compute operands of products.
extern XLA_FFI_Handler* const kFp8GroupedGemmV1;
extern XLA_FFI_Handler* const kFp8GroupedGemmDwV1;
extern XLA_FFI_Handler* const kTransposeRowsV1;
extern XLA_FFI_Handler* const kTransposeWeightsV1;
extern XLA_FFI_Handler* const kRequantizeRowsV1;
extern XLA_FFI_Handler* const kDequantizeV1;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_GEMM_GROUPED_GEMM_FFI_CUDA_H_
