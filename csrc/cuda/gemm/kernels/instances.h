// The list of all kernels. Several source files compile parts of the list in parallel.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_INSTANCES_H_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_INSTANCES_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/kernels/kernel_arguments.cuh"
#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

struct Maps {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap out;
  CUtensorMap up;     // second array of weights of a pair, read or written
  CUtensorMap slots;  // like the array of weights, and like `up`, of the experts in slots
  CUtensorMap up_slots;
  CUtensorMap inner;  // written by products with an activation
};

// How a tile is summed.
enum class Summing : int32_t {
  kWhole = 0,     // 16-bit and tf32: in the tensor cores, over all contracted elements
  kPromoted = 1,  // 8-bit: every 128 contracted elements are added to f32 sums
  kByGroup = 2,   // like kPromoted, times the group's scales, if experts have several groups
  kByBlock = 3,   // like kPromoted, times the block's scales
  kByTile = 4,    // like kPromoted, times the scales of both operands' 128 x 128 values
};

struct Instance {
  GemmProduct product;
  FloatType lhs;
  FloatType rhs;
  FloatType out;
  Summing summing;
  bool activates;
  cudaError_t (*launch)(cudaStream_t, const Maps&, const KernelArguments&, int blocks);
};

struct Instances {
  const Instance* first;
  size_t count;
};

// X(product, lhs type, rhs type, out type, summing)
#define EP_GEMM_16(X)                         \
  X(kForward, kBF16, kBF16, kBF16, kWhole)    \
  X(kForward, kBF16, kBF16, kF32, kWhole)     \
  X(kForward, kF16, kF16, kF16, kWhole)       \
  X(kForward, kF16, kF16, kF32, kWhole)       \
  X(kDataGrad, kBF16, kBF16, kBF16, kWhole)   \
  X(kDataGrad, kBF16, kBF16, kF32, kWhole)    \
  X(kDataGrad, kF16, kF16, kF16, kWhole)      \
  X(kDataGrad, kF16, kF16, kF32, kWhole)      \
  X(kWeightGrad, kBF16, kBF16, kBF16, kWhole) \
  X(kWeightGrad, kBF16, kBF16, kF32, kWhole)  \
  X(kWeightGrad, kF16, kF16, kF16, kWhole)    \
  X(kWeightGrad, kF16, kF16, kF32, kWhole)
Instances Products16Instances();

// In both operands the contracted dim is contiguous, so data gradients are forward products.
#define EP_GEMM_ROWS_8(X)                     \
  X(kForward, kE4M3, kE4M3, kBF16, kPromoted) \
  X(kForward, kE4M3, kE4M3, kF32, kPromoted)  \
  X(kForward, kE5M2, kE4M3, kBF16, kPromoted) \
  X(kForward, kE5M2, kE4M3, kF32, kPromoted)  \
  X(kForward, kE4M3, kE4M3, kBF16, kByBlock)  \
  X(kForward, kE4M3, kE4M3, kF32, kByBlock)   \
  X(kForward, kE5M2, kE4M3, kBF16, kByBlock)  \
  X(kForward, kE5M2, kE4M3, kF32, kByBlock)
Instances Rows8Instances();

// First products that also compute the activation. The result is 16-bit with 8-bit operands, and
// the activation is e4m3 then.
#define EP_GEMM_ACTIVATED(X)               \
  X(kForward, kBF16, kBF16, kBF16, kWhole) \
  X(kForward, kF16, kF16, kF16, kWhole)    \
  X(kForward, kE4M3, kE4M3, kBF16, kByBlock)
Instances ActivatedInstances();

#define EP_GEMM_WEIGHTS_8(X)                     \
  X(kWeightGrad, kE4M3, kE4M3, kBF16, kPromoted) \
  X(kWeightGrad, kE4M3, kE4M3, kF32, kPromoted)  \
  X(kWeightGrad, kE4M3, kE5M2, kBF16, kPromoted) \
  X(kWeightGrad, kE4M3, kE5M2, kF32, kPromoted)  \
  X(kWeightGrad, kE4M3, kE4M3, kBF16, kByGroup)  \
  X(kWeightGrad, kE4M3, kE4M3, kF32, kByGroup)   \
  X(kWeightGrad, kE4M3, kE5M2, kBF16, kByGroup)  \
  X(kWeightGrad, kE4M3, kE5M2, kF32, kByGroup)   \
  X(kWeightGrad, kE4M3, kE4M3, kBF16, kByTile)   \
  X(kWeightGrad, kE4M3, kE4M3, kF32, kByTile)    \
  X(kWeightGrad, kE4M3, kE5M2, kBF16, kByTile)   \
  X(kWeightGrad, kE4M3, kE5M2, kF32, kByTile)
Instances Weights8Instances();

// Forward products multiply a transposed copy of the weights, so tf32 data gradients are forward
// products too.
#define EP_GEMM_ROWS_32(X) X(kForward, kTF32, kTF32, kF32, kWhole)
Instances Rows32Instances();

#define EP_GEMM_WEIGHTS_32(X) X(kWeightGrad, kTF32, kTF32, kF32, kWhole)
Instances Weights32Instances();

// An f32 value in global memory. Tensor copies to shared memory round it to 10 fraction bits.
struct Tf32 {
  float value;
};

// The C++ type of a `FloatType`.
template <FloatType type>
struct ElementOf;
template <>
struct ElementOf<FloatType::kF32> {
  using T = float;
};
template <>
struct ElementOf<FloatType::kBF16> {
  using T = __nv_bfloat16;
};
template <>
struct ElementOf<FloatType::kF16> {
  using T = __half;
};
template <>
struct ElementOf<FloatType::kE4M3> {
  using T = __nv_fp8_e4m3;
};
template <>
struct ElementOf<FloatType::kE5M2> {
  using T = __nv_fp8_e5m2;
};
template <>
struct ElementOf<FloatType::kTF32> {
  using T = Tf32;
};
template <FloatType type>
using Element = typename ElementOf<type>::T;

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_INSTANCES_H_
