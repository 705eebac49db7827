// Matrix products of a warpgroup: operands in shared memory, sums in registers.
//
// Operand tiles are in pieces of 64 lines of 128 bytes, as a tensor copy with a 128-byte swizzle
// writes them. A piece has 64 x 64 16-bit elements, 64 x 128 8-bit ones or 64 x 32 tf32 ones. 8-bit
// and tf32 pieces have a contiguous contracted dim. A line of a 16-bit piece may also hold 64
// elements of the other dim.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_WGMMA_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace ep_runtime {
namespace cuda {
namespace gemm {

// The dim of an operand that is contiguous in memory.
enum class Along : int { kContracted = 0, kOther = 1 };

constexpr int kPieceSide = 64;
constexpr int kPieceBytes = kPieceSide * 128;
constexpr int kStepDepth = 16;  // contracted elements of one instruction

// Returns the descriptor of an operand tile that starts at `shared`, a multiple of 1024. Offsets
// are in units of 16 bytes.
template <Along kAlong>
__device__ __forceinline__ uint64_t DescribeOperand(uint32_t shared) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kEightLines = 1024 >> 4;
  // Offset from one piece to the next along the other dim. Unused if the contracted dim is
  // contiguous.
  constexpr uint64_t kNextPiece = kAlong == Along::kOther ? kPieceBytes >> 4 : 1;
  return kSwizzle128 | kEightLines << 32 | kNextPiece << 16 | (shared & 0x3FFFF) >> 4;
}
// Offset to the next kStepDepth contracted elements.
template <Along kAlong>
__device__ constexpr uint64_t StepOffset() {
  return (kAlong == Along::kOther ? kStepDepth * 128 : kStepDepth * 2) >> 4;
}

__device__ __forceinline__ void FenceOperands() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups of products are running.
template <int kPending>
__device__ __forceinline__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of the sums above the preceding wait: it sees only that they
// depend on the product.
template <int kCount>
__device__ __forceinline__ void HoldSums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define EP_SUMS_8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define EP_SUMS_32(d, i) \
  EP_SUMS_8(d, i), EP_SUMS_8(d, i + 8), EP_SUMS_8(d, i + 16), EP_SUMS_8(d, i + 24)
#define EP_SUMS_64(d) EP_SUMS_32(d, 0), EP_SUMS_32(d, 32)
#define EP_SUMS_128(d) EP_SUMS_64(d), EP_SUMS_32(d, 64), EP_SUMS_32(d, 96)

// clang-format off
#define EP_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EP_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on
#define EP_PRODUCT_N256(type)                                                            \
  asm volatile(                                                                          \
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" EP_REGISTERS_128 \
      "}, %128, %129, add, 1, 1, %131, %132; }"                                          \
      : EP_SUMS_128(sums)                                                                \
      : "l"(lhs), "l"(rhs), "r"(add), "n"(static_cast<int>(kLhs)), "n"(static_cast<int>(kRhs)))

// sums [64, 256] (+)= lhs [64, 16] x rhs [16, 256]. Without `add` the old sums are overwritten.
template <typename T, Along kLhs, Along kRhs>
__device__ __forceinline__ void Multiply(float (&sums)[128], uint64_t lhs, uint64_t rhs,
                                         uint32_t add) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>, "bf16 or f16");
  if constexpr (kBf16)
    EP_PRODUCT_N256("bf16");
  else
    EP_PRODUCT_N256("f16");
}

#define EP_PRODUCT8_N128(types)                                                 \
  asm volatile(                                                                 \
      "{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"                            \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types " {" EP_REGISTERS_64 \
      "}, %64, %65, add, 1, 1; }"                                               \
      : EP_SUMS_64(sums)                                                        \
      : "l"(lhs), "l"(rhs), "r"(add))
// Like Multiply, with 8-bit operands: 32 contracted elements (also 32 bytes) and 128 columns. The
// tensor cores keep fewer bits of these sums than f32 has, so longer sums use separate registers.
template <typename Lhs, typename Rhs>
__device__ __forceinline__ void Multiply8(float (&sums)[64], uint64_t lhs, uint64_t rhs,
                                          uint32_t add) {
  constexpr bool kNarrowLhs = std::is_same_v<Lhs, __nv_fp8_e5m2>;
  constexpr bool kNarrowRhs = std::is_same_v<Rhs, __nv_fp8_e5m2>;
  static_assert(kNarrowLhs || std::is_same_v<Lhs, __nv_fp8_e4m3>, "e4m3 or e5m2");
  static_assert(kNarrowRhs || std::is_same_v<Rhs, __nv_fp8_e4m3>, "e4m3 or e5m2");
  static_assert(!(kNarrowLhs && kNarrowRhs), "gradients are multiplied by values");
  if constexpr (kNarrowLhs)
    EP_PRODUCT8_N128("e5m2.e4m3");
  else if constexpr (kNarrowRhs)
    EP_PRODUCT8_N128("e4m3.e5m2");
  else
    EP_PRODUCT8_N128("e4m3.e4m3");
}

#define EP_PRODUCT32_N256                                                       \
  asm volatile(                                                                 \
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32 {" EP_REGISTERS_128 \
      "}, %128, %129, add, 1, 1; }"                                             \
      : EP_SUMS_128(sums)                                                       \
      : "l"(lhs), "l"(rhs), "r"(add))

// Like Multiply, with tf32 operands: 8 contracted elements (also 32 bytes) and 256 columns. The
// last 13 bits of a value are ignored.
__device__ __forceinline__ void Multiply32(float (&sums)[128], uint64_t lhs, uint64_t rhs,
                                           uint32_t add) {
  EP_PRODUCT32_N256;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_WGMMA_CUH_
