// The experts of a block call whose products take 8-bit operands: what is launched between the
// exchanges of a pass, and what stands beside them, in brackets. Weights come quantized; rows are
// quantized here, each as often as it is multiplied.
//
//   forward                                      backward
//   q_tokens <- tokens                           q_grads  <- grads
//   kept     <- q_tokens @ wi, or hidden         [dispatch x | d_inner <- q_grads @ wo^T]
//   q_inner  <- activation, quantized            q_tokens <- tokens
//   tokens   <- q_inner @ wo                     hidden   <- q_tokens @ wi, where it was not kept
//                                                q_inner  <- activation, weighted and quantized
//                                                dwo      <- q_inner^T @ q_grads
//                                                q_hidden <- activation's gradient, quantized, and
//                                                            that of weights
//                                                grads    <- q_hidden @ wi^T
//                                                [combine | dwi <- q_tokens^T @ q_hidden]
//
// Block scales are those of tokens by themselves: where a row's fill whole copies, x and dy (dy
// without a bias of wo) are quantized before they are sent, in half of the bytes, and arrive as
// q_tokens and q_grads. Tensor scales are those of a pass's rows on this device, so rows are
// quantized as they arrive.
//
// What gradients of weights are made of lies where rows were that nobody reads any more.
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

  bool SendsTokens() const { return SendsQuantized(s_); }
  // Sums of wide gradients are wanted too where there is a bias.
  bool SendsGrads() const { return SendsQuantized(s_) && p_.wo_bias == nullptr; }
  // `sent` <- so many tokens' values [tokens, H], before an exchange of either.
  cudaError_t PackTokens(const int32_t* wanted, const void* values, int32_t tokens) const;
  cudaError_t PackGrads(const int32_t* wanted, const void* values, int32_t tokens) const;

  cudaError_t Forward(const PassRows& rows) const;
  // Backward. The second exchange of two puts its wide rows where those of the first were.
  cudaError_t TakeGrads(const PassRows& rows) const;
  GroupedGemmParams InnerGrad(const PassRows& rows) const;  // d_inner
  cudaError_t TakeTokens(const PassRows& rows) const;
  // After these three: all but dwi, whose copies are made.
  cudaError_t Backward(const PassRows& rows) const;
  GroupedGemmParams FirstWeightGrad(const PassRows& rows) const;  // dwi

 private:
  Fp8Format Gradients() const { return p_.gradients; }
  cudaError_t Pack(const int32_t* wanted, const void* values, int32_t tokens,
                   Fp8Format format) const;
  cudaError_t Quantize(const PassRows& rows, const void* values, int32_t width, Fp8Format format,
                       const QuantizedRows& out) const;
  cudaError_t FirstProduct(const PassRows& rows, const Hidden& hidden, const void* wi) const;
  cudaError_t Activate(const PassRows& rows, const Hidden& hidden, bool weighted) const;
  cudaError_t Activate(QuantizedActivationParams activation, const QuantizedRows& out) const;
  // dwo and q_hidden.
  cudaError_t HiddenGrads(const PassRows& rows) const;
  cudaError_t WideHiddenGrads(const PassRows& rows) const;
  bool NeedsWide() const;
  cudaError_t ScalesOf(const int32_t* wanted, Fp8Format format, float* scale) const;
  GroupedGemmParams Product(GemmProduct product, const PassRows& rows, const QuantizedRows& lhs,
                            const void* weight, void* out, bool first) const;
  GroupedGemmParams DataGrad(const PassRows& rows, const QuantizedRows& grads, void* out,
                             bool first) const;
  cudaError_t SecondWeightGrad(const PassRows& rows) const;
  // Of copies that TurnBoth made of the same rows.
  GroupedGemmParams WeightGrad(const PassRows& rows, const QuantizedRows& lhs,
                               const QuantizedRows& grads, const Copies& copies, bool first) const;
  cudaError_t TurnBoth(const PassRows& rows, const QuantizedRows& lhs, int32_t lhs_width,
                       const QuantizedRows& grads, int32_t grads_width, const Copies& copies) const;
  cudaError_t Turn(const PassRows& rows, const QuantizedRows& from, int32_t width, Fp8Format format,
                   const Copy& to) const;
};

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_QUANTIZED_EXPERTS_H_
