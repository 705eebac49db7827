// The experts of a block call whose products take 8-bit operands: launches between the exchanges of
// a pass, and in brackets the launches that overlap an exchange. Callers give quantized weights.
// Rows are quantized here, once for each product that reads them.
//
//   forward                                      backward
//   q_tokens <- tokens                           q_grads  <- grads
//   kept     <- q_tokens @ wi                    [dispatch x | d_inner <- q_grads @ wo^T]
//   q_inner  <- activation, quantized            q_tokens <- tokens
//   tokens   <- q_inner @ wo                     hidden   <- q_tokens @ wi, if it was not saved
//                                                q_inner  <- activation, weighted and quantized
//                                                dwo      <- q_inner^T @ q_grads
//                                                q_hidden <- activation's gradient, quantized, and
//                                                            the gradient of weights
//                                                grads    <- q_hidden @ wi^T
//                                                [combine | dwi <- q_tokens^T @ q_hidden]
//
// With block scales each token is quantized alone. So if the bytes of a row's scales are a multiple
// of a copy's, x and dy (dy only without a bias of wo) are quantized before they are sent, in half
// of the bytes, and arrive as q_tokens and q_grads. A tensor scale covers all rows that a pass
// brings to this device, so rows are then quantized after they arrive.
//
// The kernel of gated first products also computes q_inner (see ProductActivates).
//
// Operands of weight gradients overwrite rows that no launch reads any more.
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
  // If wo has a bias, gradients are sent wide, because the gradient of the bias needs wide rows.
  bool SendsGrads() const { return SendsQuantized(s_) && p_.wo_bias == nullptr; }
  // Quantizes `values` [tokens, H] into `sent`, before their exchange. Does nothing if rows are
  // given packed.
  cudaError_t PackTokens(const int32_t* wanted, const void* values, int32_t tokens) const;
  cudaError_t PackGrads(const int32_t* wanted, const void* values, int32_t tokens) const;

  cudaError_t Forward(const PassRows& rows) const;
  // Backward. The second exchange overwrites the first exchange's wide rows.
  cudaError_t TakeGrads(const PassRows& rows) const;
  GroupedGemmParams InnerGrad(const PassRows& rows) const;  // d_inner
  cudaError_t TakeTokens(const PassRows& rows) const;
  // Runs everything else except dwi, and computes dwi's operands.
  cudaError_t Backward(const PassRows& rows) const;
  GroupedGemmParams FirstWeightGrad(const PassRows& rows) const;  // dwi

 private:
  Fp8Format Gradients() const { return p_.gradients; }
  cudaError_t Pack(const int32_t* wanted, const void* values, int32_t tokens,
                   Fp8Format format) const;
  cudaError_t Quantize(const PassRows& rows, const void* values, int32_t width, Fp8Format format,
                       const QuantizedRows& out) const;
  cudaError_t TransposeFirst(const int32_t* wanted, const void* from, int32_t first,
                             int32_t experts) const;
  cudaError_t FirstProduct(const PassRows& rows, const Hidden& hidden, const void* wi,
                           bool weighted) const;
  cudaError_t Activate(const PassRows& rows, const Hidden& hidden, bool weighted) const;
  cudaError_t Activate(QuantizedActivationParams activation, const QuantizedRows& out) const;
  // Computes dwo and q_hidden.
  cudaError_t HiddenGrads(const PassRows& rows) const;
  cudaError_t WideHiddenGrads(const PassRows& rows) const;
  bool NeedsWide() const;
  cudaError_t ScalesOf(const int32_t* wanted, Fp8Format format, float* scale) const;
  GroupedGemmParams Product(GemmProduct product, const PassRows& rows, const QuantizedRows& lhs,
                            const void* weight, void* out, bool first) const;
  GroupedGemmParams DataGrad(const PassRows& rows, const QuantizedRows& grads, void* out,
                             bool first) const;
  cudaError_t SecondWeightGrad(const PassRows& rows) const;
  // Returns a product of the copies that TransposeBoth made of the same rows.
  GroupedGemmParams WeightGrad(const PassRows& rows, const QuantizedRows& lhs,
                               const QuantizedRows& grads, const Copies& copies, bool first) const;
  cudaError_t TransposeBoth(const PassRows& rows, const QuantizedRows& lhs, int32_t lhs_width,
                            const QuantizedRows& grads, int32_t grads_width,
                            const Copies& copies) const;
  cudaError_t Turn(const PassRows& rows, const QuantizedRows& from, int32_t width, Fp8Format format,
                   const Copy& to) const;
};

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_QUANTIZED_EXPERTS_H_
