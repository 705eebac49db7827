// The experts of a block call whose products take 8-bit operands: what is launched between the
// exchanges of a pass. Weights come quantized; rows are quantized here, each as often as it is
// multiplied.
//
//   forward                                      backward, before dy is there and then
//   q_tokens <- quantize tokens                  q_tokens <- quantize tokens
//   kept     <- q_tokens @ wi, or hidden         hidden   <- q_tokens @ wi, where it was not kept
//   q_inner  <- activation, quantized            q_grads  <- quantize grads
//   tokens   <- q_inner @ wo                     q_inner  <- activation, weighted and quantized
//                                                dwo      <- q_inner^T @ q_grads
//                                                d_inner  <- q_grads @ wo^T
//                                                q_hidden <- activation's gradient, quantized, and
//                                                            that of weights
//                                                dwi      <- q_tokens^T @ q_hidden
//                                                grads    <- q_hidden @ wi^T
//
// What gradients of weights are made of lies where rows were that nobody reads any more. Tensor
// scales are those of a pass's rows on this device.
#ifndef EP_RUNTIME_CUDA_BLOCK_QUANTIZED_EXPERTS_H_
#define EP_RUNTIME_CUDA_BLOCK_QUANTIZED_EXPERTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block/expert_launches.h"
#include "cuda/rows/activation_quantize.h"

namespace ep_runtime {
namespace cuda {
namespace block {

class QuantizedExperts : private ExpertLaunches {
 public:
  QuantizedExperts(cudaStream_t stream, const BlockParams& params, const Workspace& at)
      : ExpertLaunches(stream, params, at) {}

  cudaError_t Forward(const PassRows& rows) const;
  // Backward, while `tokens` are there; then others may take their place.
  cudaError_t TakeTokens(const PassRows& rows) const;
  cudaError_t Backward(const PassRows& rows) const;

 private:
  Fp8Format Gradients() const { return p_.gradients; }
  cudaError_t Quantize(const PassRows& rows, const void* values, int32_t width, Fp8Format format,
                       const QuantizedRows& out) const;
  cudaError_t FirstProduct(const PassRows& rows, const Hidden& hidden, const void* wi) const;
  cudaError_t Activate(const PassRows& rows, const Hidden& hidden, bool weighted) const;
  cudaError_t Activate(QuantizedActivationParams activation, const QuantizedRows& out) const;
  // dwo, d_inner and q_hidden.
  cudaError_t HiddenGrads(const PassRows& rows) const;
  cudaError_t WideHiddenGrads(const PassRows& rows) const;
  bool NeedsWide() const;
  cudaError_t ScalesOf(const int32_t* wanted, Fp8Format format, float* scale) const;
  GroupedGemmParams Product(GemmProduct product, const PassRows& rows, const QuantizedRows& lhs,
                            const void* weight, void* out, bool first) const;
  cudaError_t DataGrad(const PassRows& rows, const QuantizedRows& grads, void* out,
                       bool first) const;
  cudaError_t WeightGrad(const PassRows& rows, const QuantizedRows& lhs, const QuantizedRows& grads,
                         const Copies& copies, bool first) const;
  cudaError_t Turn(const PassRows& rows, const QuantizedRows& from, int32_t width, Fp8Format format,
                   const Copy& to) const;
};

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_QUANTIZED_EXPERTS_H_
