// Matrix products over contiguous groups of rows whose sizes only the device knows.
//
// Letters: S slabs of C rows, L groups of a slab, G experts. Group l of slab s starts at the end of
// group l - 1, has group_sizes[s * L + l] rows (0 or more), and belongs to expert (s * L + l) % G.
// Rows past the last group of a slab are never read, so NaN in them has no effect.
//
// The tensor cores take 8-bit and tf32 operands only if the contracted dim is contiguous. Callers
// give transposed copies (copies/transpose.h) of both operands of a weight gradient, and of the
// weights of a forward product.
#ifndef EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_
#define EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_

#include <cstdint>

#include "cuda/rows/values/activation_function.h"

namespace ep_runtime {
namespace cuda {

enum class FloatType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kE4M3 = 3,
  kE5M2 = 4,
  kTF32 = 5,  // f32 operands that products round to 10 fraction bits, ties to even
};

constexpr int BytesOf(FloatType type) {
  switch (type) {
    case FloatType::kF32:
    case FloatType::kTF32:
      return 4;
    case FloatType::kBF16:
    case FloatType::kF16:
      return 2;
    case FloatType::kE4M3:
    case FloatType::kE5M2:
      break;
  }
  return 1;
}

enum class GemmProduct : int32_t {
  kForward = 0,     // rows [S * C, K'] x weights [G, K', N'] -> [S * C, N']
  kDataGrad = 1,    // rows [S * C, N'] x weights [G, K', N'] transposed -> [S * C, K']
  kWeightGrad = 2,  // rows [S * C, K'] transposed x grads [S * C, N'] -> [G, K', N']
};

// Scales of 8-bit values, in f32.
enum class GemmScaling : int32_t {
  kNone = 0,    // 16-bit and tf32 operands
  kTensor = 1,  // one for a group's rows, one for an expert's weight
  kBlock = 2,   // one for 128 contracted values of a row; one for 128 x 128 values of a weight and
                // of a weight gradient's operands
};

// Launch tuning. It does not change results.
struct GemmTuning {
  int32_t band = 8;  // pairs of row tiles that share their columns in L2
};

// A counter that hands tiles out on demand, within one launch or among several launches that
// compute one product on separate streams.
struct GemmTickets {
  // [2], device: the next ticket, and the number of clusters that found none left. Both are 0
  // before the first launch, and again after the last.
  uint32_t* words = nullptr;  // null: clusters of one launch on all SMs take tiles in turn
  int32_t blocks = 0;         // blocks of this launch, even; 0: one launch on all SMs
  int32_t all_blocks = 0;     // blocks of all launches, even
};

// Weights, or their gradients, of experts that are not in one array with the first ones.
struct GemmSlots {
  int32_t first = 0;        // these experts and later ones are in the arrays below; 0: none
  void* weights = nullptr;  // [G - first, ...], like the operand or result with weights, 16-byte
                            // aligned, anywhere
  void* up = nullptr;       // [G - first, ...], like rhs_up or out_up
};

// An activation that a forward product also computes, from its rounded result. N' is a gate and an
// up, M of each.
struct GemmActivation {
  ActivationFunction function;
  const float* weights;  // [S * C], device, factors of the values; null: none
  void* inner;           // [S * C, M], device: f(gate) * up, in out_type. With 8-bit operands e4m3.
                         // Null: no activation
  float* scale;          // [S * C, M / 128], device, with 8-bit operands
  bool power_of_two;     // true: these scales are rounded to powers of two
};

struct GroupedGemmParams {
  GemmProduct product;
  FloatType type;      // type of lhs; kTF32 instead of kF32
  FloatType rhs_type;  // type of rhs: equal to `type`, or with 8 bits kE4M3 or kE5M2. At most one
                       // is kE5M2, the format of gradients
  FloatType out_type;  // 16-bit operands: the same type or kF32; 8-bit: kBF16 or kF32; tf32: kF32
  GemmScaling scaling;
  int32_t num_slabs;
  int32_t slab_rows;           // C
  int32_t groups_per_slab;     // L
  int32_t num_experts;         // G, at most 1024
  int32_t in_features;         // K', a multiple of 8 (8-bit operands: 16, tf32: 4)
  int32_t out_features;        // N', a multiple of the same number
  const int32_t* group_sizes;  // [S, L], device; rows past C in total are cut off
  // lhs and rhs are on the device, 16-byte aligned. P is PaddedSlabRows(C, L).
  const void* lhs;  // [S * C, K'] (kDataGrad: N'); 8-bit, tf32 kWeightGrad: [K', S * P]
  const void* rhs;  // [G, K', N'] (kWeightGrad: [S * C, N']); 8-bit kForward: [G, N', K'],
                    // 8-bit, tf32 kWeightGrad: [N', S * P]
  // If gate and up are two arrays, they are treated as one array of weights: N' is two halves,
  // multiples of 64 each; rhs (kWeightGrad: out) is [G, K', N' / 2], and rhs_up (out_up) is the
  // second half. Null: one array.
  const void* rhs_up;      // only with 16-bit and tf32 operands
  void* rhs_copy;          // only tf32 kForward: [G, N', K'], device; gets a transposed copy of rhs
  const float* lhs_scale;  // kTensor: [S, L]; kBlock: [S * C, ceil(K' / 128)] (kDataGrad: N';
                           // kWeightGrad: [S * P / 128, ceil(K' / 128)])
  const float* rhs_scale;  // kTensor: [G] (kWeightGrad: [S, L]);
                           // kBlock: [G, ceil(K' / 128), ceil(N' / 128)] (kWeightGrad:
                           // [S * P / 128, ceil(N' / 128)])
  const void* bias;        // [G, N'] bias_type, device; null: none. kForward only
  FloatType bias_type;
  void* out;        // out_type, device, 16-byte aligned. Experts without rows get zeros.
                    // With an activation, null: not stored
  void* out_up;     // only kWeightGrad, like rhs_up
  GemmSlots slots;  // only if each expert has one group. Gradients of slots without rows do
                    // not change
  GemmActivation activation;  // only 16-bit operands and a 16-bit result, M a multiple of 8; or
                              // kE4M3 with kBlock and a kBF16 result, M a multiple of 128
  bool clear_slack;           // true: rows in no group become zero; false: they do not change
  bool adds;                  // kWeightGrad: adds to the values in `out`, and rounds the result
  const int32_t* wanted;      // [1], device: 0 if the launch has nothing to do. Null: always runs
  GemmTuning tuning;
  GemmTickets tickets;
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_
