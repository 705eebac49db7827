// Matrix products over contiguous groups of rows whose sizes only the device knows.
//
// Letters: S slabs of C rows, L groups of a slab, G experts. Group l of slab s starts where group
// l - 1 ends, has group_sizes[s * L + l] rows, any number, and belongs to expert (s * L + l) % G.
// Rows past the last group of a slab are not looked at: NaN there reaches nothing.
//
// The tensor cores take 8-bit and tf32 operands with the contracted dim along memory alone:
// transposed copies (copies/transpose.h) of both operands for the weight gradient, and of weights
// going forward.
#ifndef EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_
#define EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

enum class FloatType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kE4M3 = 3,
  kE5M2 = 4,
  kTF32 = 5,  // f32 operands that products round to 10 bits behind the point, ties to even
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

// What 8-bit values are multiplied by. Scales are f32.
enum class GemmScaling : int32_t {
  kNone = 0,    // 16-bit and tf32 operands
  kTensor = 1,  // one of a group's rows, one of an expert's weight
  kBlock = 2,   // one of 128 contracted values of a row, one of 128 x 128 of a weight, and of a
                // weight gradient's operands
};

// Launch tuning; the numbers do not depend on it.
struct GemmTuning {
  int32_t band = 8;  // pairs of row tiles that share their columns in L2
};

// Tiles go to whoever comes for them, of one launch or of several that do one product together on
// streams of their own.
struct GemmTickets {
  // [2], device: the next ticket, and the clusters that found none left. Both 0 before the first
  // launch, and again after the last one.
  uint32_t* words = nullptr;  // null: clusters take turns, of one launch on all SMs
  int32_t blocks = 0;         // of this launch, even; 0: it is the only one, on all SMs
  int32_t all_blocks = 0;     // of all of them, likewise
};

struct GroupedGemmParams {
  GemmProduct product;
  FloatType type;      // of lhs; kTF32, not kF32
  FloatType rhs_type;  // that, or with 8 bits kE4M3 or kE5M2; not both kE5M2, which gradients are
  FloatType out_type;  // of 16-bit operands theirs or kF32; of 8-bit ones kBF16 or kF32; of tf32
                       // ones kF32
  GemmScaling scaling;
  int32_t num_slabs;
  int32_t slab_rows;           // C
  int32_t groups_per_slab;     // L
  int32_t num_experts;         // G, at most 1024
  int32_t in_features;         // K', a multiple of 8; of 16 with 8-bit operands, 4 with tf32 ones
  int32_t out_features;        // N', likewise
  const int32_t* group_sizes;  // [S, L], device; what exceeds C in sum is cut off
  // Both device, 16-byte aligned. P: PaddedSlabRows(C, L).
  const void* lhs;  // [S * C, K'] (kDataGrad: N'); 8-bit, tf32 kWeightGrad: [K', S * P]
  const void* rhs;  // [G, K', N'] (kWeightGrad: [S * C, N']); 8-bit kForward: [G, N', K'],
                    // 8-bit, tf32 kWeightGrad: [N', S * P]
  // Gate and up kept apart stand for one array of weights: N' is two halves, multiples of 64 each;
  // rhs (kWeightGrad: out) is [G, K', N' / 2], and this is the second. Null: there is one array.
  const void* rhs_up;      // 16-bit and tf32 operands alone
  void* rhs_copy;          // tf32 kForward alone: [G, N', K'], device, written: a transposed copy
  const float* lhs_scale;  // kTensor: [S, L]; kBlock: [S * C, ceil(K' / 128)] (kDataGrad: N';
                           // kWeightGrad: [S * P / 128, ceil(K' / 128)])
  const float* rhs_scale;  // kTensor: [G] (kWeightGrad: [S, L]);
                           // kBlock: [G, ceil(K' / 128), ceil(N' / 128)] (kWeightGrad:
                           // [S * P / 128, ceil(N' / 128)])
  const void* bias;        // [G, N'] bias_type, device; null: none. kForward only
  FloatType bias_type;
  void* out;              // out_type, device, 16-byte aligned. Experts without rows get zeros.
  void* out_up;           // kWeightGrad alone, as rhs_up
  bool clear_slack;       // rows of no group get zeros; they are left as they are without it
  bool adds;              // kWeightGrad: to what `out` holds, and rounds again
  const int32_t* wanted;  // [1], device: 0 where the launch has nothing to do. Null: it has
  GemmTuning tuning;
  GemmTickets tickets;
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_PRODUCT_PRODUCT_H_
