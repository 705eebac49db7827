// Matrix products over contiguous groups of rows whose sizes only the device knows.
//
// Letters: S slabs of C rows, L groups of a slab, G experts. Group l of slab s starts where group
// l - 1 ends, has group_sizes[s * L + l] rows, any number, and belongs to expert (s * L + l) % G.
// Rows past the last group of a slab are not looked at: NaN there reaches nothing.
#ifndef EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
#define EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace cuda {

enum class FloatType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

enum class GemmProduct : int32_t {
  kForward = 0,     // rows [S * C, K'] x weights [G, K', N'] -> [S * C, N']
  kDataGrad = 1,    // rows [S * C, N'] x weights [G, K', N'] transposed -> [S * C, K']
  kWeightGrad = 2,  // rows [S * C, K'] transposed x grads [S * C, N'] -> [G, K', N']
};

// Launch tuning; the numbers do not depend on it.
struct GemmTuning {
  int32_t tile_columns = 256;  // of a block's output tile: 128 or 256
  int32_t band = 8;            // pairs of row tiles that share their columns in L2
};

// What measured best.
GemmTuning TunedGemm(GemmProduct product);

struct GroupedGemmParams {
  GemmProduct product;
  FloatType type;      // of lhs and rhs: kBF16 or kF16
  FloatType out_type;  // that, or kF32; sums are f32 in any case
  int32_t num_slabs;
  int32_t slab_rows;           // C
  int32_t groups_per_slab;     // L
  int32_t num_experts;         // G, at most 1024
  int32_t in_features;         // K', a multiple of 8
  int32_t out_features;        // N', a multiple of 8
  const int32_t* group_sizes;  // [S, L], device; what exceeds C in sum is cut off
  const void* lhs;             // [S * C, K'] type (kDataGrad: N'), device, 16-byte aligned
  const void* rhs;             // [G, K', N'] type (kWeightGrad: [S * C, N']), device, likewise
  const void* bias;            // [G, N'] bias_type, device; null: none. kForward only
  FloatType bias_type;
  void* out;         // out_type, device, 16-byte aligned. Experts without rows get zeros.
  bool clear_slack;  // rows of no group get zeros; they are left as they are without it
  GemmTuning tuning;
};

// One launch, two with clear_slack; no workspace. cudaErrorInvalidValue: a limit above does not
// hold.
cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_GROUPED_GEMM_H_
