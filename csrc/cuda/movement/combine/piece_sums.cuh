// Sums a piece of a row in a warp's registers: adds parts, rounds sums and stores them.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PIECE_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PIECE_SUMS_CUH_

#include "cuda/movement/call/row_math.cuh"
#include "cuda/movement/combine/fp8_sums.cuh"
#include "cuda/movement/combine/part_sums.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

template <RowType kType>
using Sums = float[kVectors][Element<kType>::kPerVector];

template <RowType kType>
__device__ __forceinline__ void Clear(Sums<kType>& sums) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int j = 0; j < Element<kType>::kPerVector; ++j) sums[u][j] = 0.0f;
  }
}

// A lane's share of one part's piece.
template <RowType kType, bool kWide>
struct PartVectors {
  using E = Element<kWide ? RowType::kF32 : kType>;
  static constexpr int kWords = Element<kType>::kPerVector / E::kPerVector;
  uint4 words[kVectors][kWords];

  __device__ __forceinline__ void Read(const uint8_t* part, int vectors) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = u * 32 + static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[u][i] = index < vectors ? reinterpret_cast<const uint4*>(part)[index * kWords + i]
                                      : make_uint4(0, 0, 0, 0);
      }
    }
  }
  // Depends on every load of Read.
  __device__ __forceinline__ uint32_t Mixed() const {
    uint32_t mixed = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) mixed ^= words[u][i].x;
    }
    return mixed;
  }
  template <bool kWeighted>
  __device__ __forceinline__ void AddTo(float weight, Sums<kType>& sums) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float x[E::kPerVector];
        E::Unpack(words[u][i], x);
#pragma unroll
        for (int j = 0; j < E::kPerVector; ++j) {
          float& sum = sums[u][i * E::kPerVector + j];
          sum = __fadd_rn(sum, kWeighted ? __fmul_rn(weight, x[j]) : x[j]);
        }
      }
    }
  }
};

// A lane's share of one part's piece that another rank sent as 8-bit floats.
template <RowType kType>
struct Fp8Vectors {
  static constexpr int kPer = Element<kType>::kPerVector;
  uint32_t words[kVectors][kPer / 4];
  float scales[kVectors];

  __device__ __forceinline__ void Read(const uint8_t* part, int vectors) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = u * 32 + static_cast<int>(threadIdx.x % 32);
      const bool here = index < vectors;
#pragma unroll
      for (int i = 0; i < kPer / 4; ++i) {
        words[u][i] = here ? reinterpret_cast<const uint32_t*>(part)[index * (kPer / 4) + i] : 0u;
      }
      const auto* of_blocks = reinterpret_cast<const float*>(part + vectors * kPer);
      scales[u] = here ? of_blocks[index * kPer / kFp8Block] : 1.0f;
    }
  }
  // Depends on every load of Read.
  __device__ __forceinline__ uint32_t Mixed() const {
    uint32_t mixed = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      mixed ^= __float_as_uint(scales[u]);
#pragma unroll
      for (int i = 0; i < kPer / 4; ++i) mixed ^= words[u][i];
    }
    return mixed;
  }
  __device__ __forceinline__ void AddTo(Sums<kType>& sums) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      float x[kPer];
#pragma unroll
      for (int i = 0; i < kPer / 4; ++i) FromFp8(words[u][i], scales[u], x + 4 * i);
#pragma unroll
      for (int j = 0; j < kPer; ++j) sums[u][j] = __fadd_rn(sums[u][j], x[j]);
    }
  }
};

// sums += a piece of a part that another rank sent.
template <RowType kType, CombinePrecision kPrecision, typename Done>
__device__ __forceinline__ void AddSent(const uint8_t* part, int vectors, const Done& done,
                                        Sums<kType>& sums) {
  if constexpr (kPrecision == CombinePrecision::kFp8) {
    Fp8Vectors<kType> x;
    x.Read(part, vectors);
    done(x.Mixed());
    x.AddTo(sums);
  } else {
    PartVectors<kType, kPrecision == CombinePrecision::kExact> x;
    x.Read(part, vectors);
    done(x.Mixed());
    x.template AddTo<false>(1.0f, sums);
  }
}

// Rounds a sum as if it were sent to another rank.
template <RowType kType, CombinePrecision kPrecision>
__device__ __forceinline__ void RoundAsSent(Sums<kType>& own) {
  using E = Element<kType>;
  if constexpr (kPrecision == CombinePrecision::kFast) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) E::Unpack(E::Pack(own[u]), own[u]);
  }
  if constexpr (kPrecision == CombinePrecision::kFp8) {
    const PieceScales<E::kPerVector> scales = ScalesOf<E::kPerVector>(own);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const float scale = scales.Of(scales.scale, u), inverse = scales.Of(scales.inverse, u);
#pragma unroll
      for (int i = 0; i < E::kPerVector; i += 4) {
        FromFp8(ToFp8(&own[u][i], inverse), scale, &own[u][i]);
      }
    }
  }
}

// sums += own, rounded as if it were sent to another rank.
template <RowType kType, CombinePrecision kPrecision>
__device__ __forceinline__ void AddOwn(Sums<kType>& own, Sums<kType>& sums) {
  RoundAsSent<kType, kPrecision>(own);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int j = 0; j < Element<kType>::kPerVector; ++j) {
      sums[u][j] = __fadd_rn(sums[u][j], own[u][j]);
    }
  }
}

// Stores the sums of a piece, in f32 if `wide`, else in the row type.
template <RowType kType, bool kWide>
__device__ __forceinline__ void StoreSums(const Sums<kType>& sums, uint8_t* out, int vectors) {
  using E = Element<kType>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int index = u * 32 + lane;
    if (index >= vectors) continue;
    if constexpr (kWide && E::kPerVector == 8) {
      StoreVector(out + index * 32, Element<RowType::kF32>::Pack(&sums[u][0]));
      StoreVector(out + index * 32 + 16, Element<RowType::kF32>::Pack(&sums[u][4]));
    } else {
      StoreVector(out + index * 16, E::Pack(sums[u]));
    }
  }
}

// Stores the sums of a piece as 8-bit floats; infinities become NaN.
template <RowType kType>
__device__ __forceinline__ void StoreFp8Sums(Sums<kType>& sums, uint8_t* out, int vectors) {
  constexpr int kPer = Element<kType>::kPerVector;
  const int lane = threadIdx.x % 32;
  const PieceScales<kPer> scales = ScalesOf<kPer>(sums);
  const float stored = scales.Stored();
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const float inverse = scales.Of(scales.inverse, u);
    const int index = u * 32 + lane;
    if (index >= vectors) continue;
    uint32_t words[kPer / 4];
#pragma unroll
    for (int i = 0; i < kPer / 4; ++i) words[i] = ToFp8(&sums[u][4 * i], inverse);
    if constexpr (kPer == 8) {
      *reinterpret_cast<uint2*>(out + index * kPer) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(out + index * kPer) = words[0];
    }
  }
  const int values = vectors * kPer;
  if (lane * kFp8Block < values) reinterpret_cast<float*>(out + values)[lane] = stored;
}

// Stores the sums of a piece in the format that is sent to other ranks.
template <RowType kType, CombinePrecision kPrecision>
__device__ __forceinline__ void StoreSent(Sums<kType>& sums, uint8_t* out, int vectors) {
  if constexpr (kPrecision == CombinePrecision::kFp8) {
    StoreFp8Sums<kType>(sums, out, vectors);
  } else {
    StoreSums<kType, kPrecision == CombinePrecision::kExact>(sums, out, vectors);
  }
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PIECE_SUMS_CUH_
