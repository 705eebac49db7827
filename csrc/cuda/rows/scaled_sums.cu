// Sums 8-bit rows.
#include "cuda/rows/quantize.h"
#include "cuda/rows/scaled_sums.h"
#include "cuda/rows/values/fp8.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

using E4M3 = Fp8<Fp8Format::kE4M3>;

constexpr int kMaxThreads = 256;  // threads that share a token
constexpr int kUnroll = 4;        // rows of a token that are loaded at once
constexpr int kValues = 8;        // values of a lane

__device__ __forceinline__ uint2 LoadBytes(const uint8_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
}

__device__ __forceinline__ void AddScaled(uint32_t word, float scale, float* total) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 pair = E4M3::Widen(word >> (16 * half) & 0xFFFFu);
    total[2 * half] = __fadd_rn(total[2 * half], MultiplyFlushed(pair.x, scale));
    total[2 * half + 1] = __fadd_rn(total[2 * half + 1], MultiplyFlushed(pair.y, scale));
  }
}

// blockIdx.x is the token.
template <RowType kType>
__global__ void __launch_bounds__(kMaxThreads)
    SumScaledKernel(const __grid_constant__ SumScaledRowsParams p) {
  using E = Element<kType>;
  const int pieces = p.width / kValues, tiles = (p.width + kTile - 1) / kTile;
  const int32_t* slot_row = p.slot_row + static_cast<int64_t>(blockIdx.x) * p.slots;
  auto* out = static_cast<uint4*>(p.out) +
              static_cast<int64_t>(blockIdx.x) * pieces * (kValues / E::kPerVector);
  for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    float total[kValues] = {};
    for (int base = 0; base < p.slots; base += kUnroll) {
      uint2 bytes[kUnroll];
      float scale[kUnroll];
      bool there[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t row = base + u < p.slots ? __ldg(slot_row + base + u) : -1;
        there[u] = row >= 0 && row < p.num_rows;
        if (!there[u]) continue;
        bytes[u] = LoadBytes(p.data + row * p.width + int64_t{piece} * kValues);
        scale[u] = __ldg(p.scale + row * tiles + piece / (kTile / kValues));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!there[u]) continue;
        AddScaled(bytes[u].x, scale[u], total);
        AddScaled(bytes[u].y, scale[u], total + 4);
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; i += E::kPerVector) {
      StoreVector(out + piece * (kValues / E::kPerVector) + i / E::kPerVector, E::Pack(total + i));
    }
  }
}

}  // namespace
}  // namespace rows

cudaError_t LaunchSumScaledRows(cudaStream_t stream, const SumScaledRowsParams& p) {
  if (p.width <= 0 || p.width % kQuantizedMultiple != 0 || p.tokens <= 0 || p.slots <= 0 ||
      p.num_rows <= 0 || !rows::Aligned(p.data) || !rows::Aligned(p.out)) {
    return cudaErrorInvalidValue;
  }
  const int threads = rows::ThreadsFor(p.width / rows::kValues, rows::kMaxThreads);
  return rows::LaunchForFloat(p.type, [&](auto type) {
    rows::SumScaledKernel<decltype(type)::value><<<p.tokens, threads, 0, stream>>>(p);
  });
}

}  // namespace cuda
}  // namespace ep_runtime
