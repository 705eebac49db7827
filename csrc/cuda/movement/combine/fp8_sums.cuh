// Computes scales to convert a piece's sums to 8-bit floats, in all lanes of a warp together.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_SUMS_CUH_

#include "cuda/movement/combine/fp8_parts.cuh"
#include "cuda/movement/combine/part_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

// Scales of a piece whose lanes have kPer neighbouring values of each of kVectors vectors. A block
// is kFp8Block values that share a scale, in neighbouring lanes. Every lane computes one scale, not
// the scales of all its values.
template <int kPer>
struct PieceScales {
  static constexpr int kLanes = kFp8Block / kPer;  // lanes of a block
  static constexpr int kBlocks = 32 / kLanes;      // blocks of a vector
  static_assert(kVectors == 4 && kLanes >= 4);

  // Scale of this lane's block, in the vector for which this lane computes it.
  float scale;
  float inverse;

  // Lanes of a block whose numbers end with these two bits have the scale of vector `u`.
  __device__ static int LaneOf(int u) { return u >> 1 | (u & 1) << 1; }
  __device__ float Of(float mine, int u) const {
    const int block = static_cast<int>(threadIdx.x % 32) / kLanes * kLanes;
    return __shfl_sync(~0u, mine, block + LaneOf(u));
  }
  // Returns in lane i the scale of block i of the piece.
  __device__ float Stored() const {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(~0u, scale, lane % kBlocks * kLanes + LaneOf(lane / kBlocks % kVectors));
  }
};

// Returns the largest value of this lane's block, in the vector for which this lane computes the
// scale. Each step halves a lane's values, or the lanes that hold them.
template <int kPer>
__device__ __forceinline__ float LargestOfBlock(const float (&largest)[kVectors]) {
  const int lane = threadIdx.x % 32;
  const bool upper = (lane & 1) != 0, odd = (lane & 2) != 0;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float mine = upper ? largest[2 + i] : largest[i];
    const float theirs = upper ? largest[i] : largest[2 + i];
    pair[i] = fmaxf(mine, __shfl_xor_sync(~0u, theirs, 1));
  }
  float one = fmaxf(odd ? pair[1] : pair[0], __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 2));
#pragma unroll
  for (int step = 4; step < PieceScales<kPer>::kLanes; step *= 2) {
    one = fmaxf(one, __shfl_xor_sync(~0u, one, step));
  }
  return one;
}

template <int kPer>
__device__ __forceinline__ float LargestOf(const float (&sums)[kVectors][kPer]) {
  float largest[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    largest[u] = 0.0f;  // fmaxf ignores NaN
#pragma unroll
    for (int j = 0; j < kPer; ++j) largest[u] = fmaxf(largest[u], fabsf(sums[u][j]));
  }
  return LargestOfBlock<kPer>(largest);
}

// Computes scales from the finite values, and makes infinities NaN. All lanes call this.
template <int kPer>
__device__ __forceinline__ PieceScales<kPer> ScalesOf(float (&sums)[kVectors][kPer]) {
  float largest = LargestOf<kPer>(sums);
  if (__any_sync(~0u, isinf(largest))) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (isinf(sums[u][j])) sums[u][j] = __uint_as_float(0x7FC00000u);
      }
    }
    largest = LargestOf<kPer>(sums);
  }
  const float scale = E4M3::ScaleOf(largest, /*power_of_two=*/false);
  return {scale, __frcp_rn(scale)};
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_FP8_SUMS_CUH_
