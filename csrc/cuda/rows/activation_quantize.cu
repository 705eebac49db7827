// Kernels that compute activations or their gradients as 8-bit floats.
#include <type_traits>

#include "cuda/rows/activation_quantize.h"
#include "cuda/rows/row_groups.cuh"
#include "cuda/rows/values/activation_values.cuh"
#include "cuda/rows/values/fp8.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerProcessor = 32;
constexpr int kAmaxBlocksPerProcessor = 8;  // few, because a warp with more rows needs fewer
                                            // atomics
constexpr int kTileLanes = kTile / 8;       // each lane has one piece of 8 values

enum class Way { kAmax, kScale, kTiles };

using Params = QuantizedActivationParams;

// The operands that a lane reads, and the values it computes from them.
template <RowType kType, bool kGated, bool kBackward>
struct Source {
  static constexpr int kOut = kGated && kBackward ? 2 : 1;  // gate and up, or their product
  // Vectors of each operand that a lane loads at once.
  static constexpr int kUnroll = kGated || kBackward ? 2 : 4;
  uint4 gate, up, grad;

  __device__ void Load(const Params& p, int64_t row, int vector) {
    const int64_t vectors = p.width / 8;
    const auto* hidden = static_cast<const uint4*>(p.hidden) + row * vectors * (kGated ? 2 : 1);
    gate = LoadStream(hidden + vector);
    if (kGated) up = LoadStream(hidden + vectors + vector);
    if (kBackward) grad = LoadStream(static_cast<const uint4*>(p.grad) + row * vectors + vector);
  }
  // Returns the sum of grad times value.
  __device__ float Compute(const Params& p, float weight, Piece<kType>* out) {
    float sum = 0.0f;
    if (kBackward) {
      sum = Gradients<kType, kGated>(p.function, grad, weight, &gate, &up);
    } else {
      gate = Values<kType, kGated>(p.function, gate, up, weight);
    }
    Put(gate, out);
    if (kOut == 2) Put(up, out + 1);
    return sum;
  }

 private:
  __device__ static void Put(const uint4& vector, Piece<kType>* out) {
    out->words[0] = vector.x;
    out->words[1] = vector.y;
    out->words[2] = vector.z;
    out->words[3] = vector.w;
  }
};

// Pieces that a lane computes in one turn, and their place in a row. Output o of vector u is at
// index u * kOut + o.
template <RowType kType, int kUnroll, int kOut>
struct TransposePieces {
  static constexpr int kPieces = kUnroll * kOut;
  int64_t row;  // number among the rows of all slabs
  int first;    // vector of the warp's first lane
  Piece<kType> out[kPieces];
};

// Returns the largest magnitudes of pieces 2w and 2w + 1, or of a single piece.
template <bool kFinite, typename T>
__device__ __forceinline__ uint32_t Largest(const T& turn, int w) {
  const auto of = [&](int i) {
    return kFinite ? turn.out[i].LargestFinite() : turn.out[i].Largest();
  };
  return T::kPieces == 1 ? of(0) : of(2 * w) | of((2 * w + 1) % T::kPieces) << 16;
}

// Returns the largest magnitude of the tile that has piece lane % kPieces, over the lanes of that
// tile. Call this with whole warps.
template <RowType kType, typename T>
__device__ __forceinline__ uint32_t TileLargest(const T& turn) {
  constexpr int kWords = (T::kPieces + 1) / 2;
  const int piece = threadIdx.x % T::kPieces;
  bool finite = true;
  const auto over = [&](auto only_finite) {
    uint32_t mine = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t size = Largest<decltype(only_finite)::value>(turn, w);
#pragma unroll
      for (int step = kTileLanes / 2; step > 0; step /= 2) {
        size = __vmaxu2(size, __shfl_xor_sync(kAllLanes, size, step));
      }
      finite = finite && __vcmpgeu2(size, Magnitude<kType>::kInfinity * 0x10001u) == 0;
      if (piece / 2 == w) mine = size;
    }
    return mine >> piece % 2 * 16 & 0xFFFFu;
  };
  const uint32_t largest = over(std::false_type{});
  if (__all_sync(kAllLanes, finite)) return largest;
  return over(std::true_type{});
}

// Stores a turn as 8-bit floats. Call this with whole warps.
template <RowType kType, Fp8Format kFormat, bool kTiled, int kOut, typename T>
__device__ __forceinline__ void Store(const Params& p, float inverse, const T& turn) {
  const int lane = threadIdx.x % 32, vectors = p.width / 8;
  float inverses = 0.0f;
  if (kTiled) {
    // One division and one inverse for every tile, instead of one in every lane.
    const float amax = Magnitude<kType>::ToFloat(TileLargest<kType>(turn));
    const float scale = Fp8<kFormat>::ScaleOf(amax, p.power_of_two);
    inverses = __frcp_rn(scale);
    const int piece = lane % kTileLanes, tiles = (p.width + kTile - 1) / kTile;
    const int tile = turn.first / kTileLanes + piece / kOut * 2 + lane / kTileLanes;
    if (piece < T::kPieces && tile < tiles) {
      p.tile_scale[(turn.row * kOut + piece % kOut) * tiles + tile] = scale;
    }
  }
#pragma unroll
  for (int i = 0; i < T::kPieces; ++i) {
    const int vector = turn.first + i / kOut * 32 + lane;
    if (kTiled) inverse = __shfl_sync(kAllLanes, inverses, lane / kTileLanes * kTileLanes + i);
    const uint2 bytes = Convert<kType, kFormat>(turn.out[i], [=](int) { return inverse; });
    if (vector < vectors) {
      StorePiece(p.data, (turn.row * kOut + i % kOut) * p.width + vector * 8, bytes);
    }
  }
}

// Visits a row. Lanes take the row's vectors in the order of `ActivationKernel`, so that sums have
// the same order. Whole warps call `take(turn)`, with zeros past the end of the row.
template <RowType kType, bool kGated, bool kBackward, typename Take>
__device__ __forceinline__ float OverRow(const Params& p, int64_t row, Take take) {
  using S = Source<kType, kGated, kBackward>;
  const int vectors = p.width / 8, lane = threadIdx.x % 32;
  const float weight = p.weights == nullptr ? 1.0f : __ldg(p.weights + row);
  float sum = 0.0f;
  for (int base = 0; base < vectors; base += 32 * S::kUnroll) {
    S source[S::kUnroll];
#pragma unroll
    for (int u = 0; u < S::kUnroll; ++u) {
      const int vector = base + u * 32 + lane;
      if (vector < vectors) source[u].Load(p, row, vector);
    }
    TransposePieces<kType, S::kUnroll, S::kOut> turn;
    turn.row = row;
    turn.first = base;
#pragma unroll
    for (int u = 0; u < S::kUnroll; ++u) {
#pragma unroll
      for (int o = 0; o < S::kOut; ++o) turn.out[u * S::kOut + o].Clear();
      if (base + u * 32 + lane < vectors) {
        sum += source[u].Compute(p, weight, turn.out + u * S::kOut);
      }
    }
    take(turn);
  }
  return sum;
}

// Returns the amax of rows first to last - 1 of a slab. Call this with whole warps.
template <RowType kType, bool kGated, bool kBackward>
__device__ __forceinline__ float RowsAmax(const Params& p, int64_t first, int64_t last) {
  uint32_t largest = 0;
  for (int64_t row = first; row < last; ++row) {
    OverRow<kType, kGated, kBackward>(p, row, [&](const auto& turn) {
      constexpr int kPieces = std::decay_t<decltype(turn)>::kPieces;
#pragma unroll
      for (int w = 0; w < (kPieces + 1) / 2; ++w) {
        uint32_t size = Largest<false>(turn, w);
        if (__vcmpgeu2(size, Magnitude<kType>::kInfinity * 0x10001u) != 0) {
          size = Largest<true>(turn, w);
        }
        largest = __vmaxu2(largest, size);
      }
    });
  }
  largest = __reduce_max_sync(kAllLanes, max(largest >> 16, largest & 0xFFFFu));
  return Magnitude<kType>::ToFloat(largest);
}

__global__ void ClearAmax(float* values, int count, const int32_t* wanted) {
  if (LeftOut(wanted)) return;
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0.0f;
}

// blockIdx.y is the slab. A warp has consecutive rows, which belong to few groups.
template <RowType kType, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kThreads) AmaxOfActivation(const __grid_constant__ Params p) {
  __shared__ int32_t ends[kMaxGroupsPerSlab];
  if (LeftOut(p.wanted)) return;
  const int slab = blockIdx.y, groups = p.groups.groups_per_slab;
  GroupEnds(p.groups, slab, ends);
  const int64_t used = ends[groups - 1], above = static_cast<int64_t>(slab) * p.groups.slab_rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t each = (used + warps - 1) / warps;
  const int64_t end = min(warp * each + each, used);
  for (int64_t row = warp * each; row < end;) {
    const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
    const int64_t last = min(end, static_cast<int64_t>(ends[group]));
    const float amax = RowsAmax<kType, kGated, kBackward>(p, above + row, above + last);
    row = last;
    if (threadIdx.x % 32 != 0) continue;
    const int64_t number = static_cast<int64_t>(slab) * groups + group;
    // The bits of non-negative floats, as integers, have the same order as the floats.
    atomicMax(reinterpret_cast<unsigned*>(p.amax + number % p.num_experts), __float_as_uint(amax));
  }
}

// blockIdx.y is the slab. Warps take the rows in turn.
template <RowType kType, bool kGated, bool kBackward, Fp8Format kFormat, bool kTiled>
__global__ void __launch_bounds__(kThreads) QuantizeActivation(const __grid_constant__ Params p) {
  using S = Source<kType, kGated, kBackward>;
  __shared__ int32_t ends[kMaxGroupsPerSlab];
  if (LeftOut(p.wanted)) return;
  const int slab = blockIdx.y, groups = p.groups.groups_per_slab;
  GroupEnds(p.groups, slab, ends);
  const int32_t used = ends[groups - 1];
  const int64_t above = static_cast<int64_t>(slab) * p.groups.slab_rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < used;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    float inverse = 1.0f;
    if (!kTiled) {
      const int group = GroupOf(ends, groups, static_cast<int32_t>(row));
      inverse = __frcp_rn(__ldg(p.group_scale + static_cast<int64_t>(slab) * groups + group));
    }
    float sum = OverRow<kType, kGated, kBackward>(p, above + row, [&](const auto& turn) {
      Store<kType, kFormat, kTiled, S::kOut>(p, inverse, turn);
    });
    if constexpr (kBackward) {
      if (p.d_weights == nullptr) continue;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (threadIdx.x % 32 == 0) p.d_weights[above + row] = sum;
    }
  }
  if constexpr (kBackward) {
    if (p.d_weights == nullptr) return;
    for (int64_t row = used + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         row < p.groups.slab_rows; row += static_cast<int64_t>(gridDim.x) * kThreads) {
      p.d_weights[above + row] = 0.0f;
    }
  }
}

template <RowType kType, bool kGated, bool kBackward>
void Launch(cudaStream_t stream, const Params& p, dim3 grid) {
  if (p.amax != nullptr) {
    ClearAmax<<<1, kThreads, 0, stream>>>(p.amax, p.num_experts, p.wanted);
    AmaxOfActivation<kType, kGated, kBackward><<<grid, kThreads, 0, stream>>>(p);
    return;
  }
  const auto launch = [&](auto format) {
    constexpr Fp8Format kFormat = decltype(format)::value;
    if (p.group_scale == nullptr) {
      QuantizeActivation<kType, kGated, kBackward, kFormat, true><<<grid, kThreads, 0, stream>>>(p);
    } else {
      QuantizeActivation<kType, kGated, kBackward, kFormat, false>
          <<<grid, kThreads, 0, stream>>>(p);
    }
  };
  if (p.format == Fp8Format::kE4M3) {
    launch(std::integral_constant<Fp8Format, Fp8Format::kE4M3>{});
  } else {
    launch(std::integral_constant<Fp8Format, Fp8Format::kE5M2>{});
  }
}

template <RowType kType>
void Launch(cudaStream_t stream, const Params& p, dim3 grid) {
  if (p.gated) {
    p.grad != nullptr ? Launch<kType, true, true>(stream, p, grid)
                      : Launch<kType, true, false>(stream, p, grid);
  } else {
    p.grad != nullptr ? Launch<kType, false, true>(stream, p, grid)
                      : Launch<kType, false, false>(stream, p, grid);
  }
}

bool Valid(const Params& p) {
  const auto function = static_cast<int32_t>(p.function);
  const bool asked = p.amax != nullptr ? p.num_experts > 0
                                       : (p.group_scale == nullptr) != (p.tile_scale == nullptr);
  return Fits(p.groups) && p.groups.groups_per_slab > 0 && Aligned(p.hidden) && Aligned(p.grad) &&
         asked && p.width > 0 && p.width % kQuantizedMultiple == 0 && function >= 0 &&
         function < kActivationFunctions;
}

}  // namespace
}  // namespace rows

cudaError_t LaunchQuantizedActivation(cudaStream_t stream, const QuantizedActivationParams& p) {
  if (!rows::Valid(p) || (p.type != RowType::kBF16 && p.type != RowType::kF16)) {
    return cudaErrorInvalidValue;
  }
  dim3 grid;
  const int blocks = p.amax != nullptr ? rows::kAmaxBlocksPerProcessor : rows::kBlocksPerProcessor;
  const cudaError_t error = rows::GridOf(p.groups, rows::kWarps, blocks, &grid);
  if (error != cudaSuccess) return error;
  if (p.type == RowType::kBF16) {
    rows::Launch<RowType::kBF16>(stream, p, grid);
  } else {
    rows::Launch<RowType::kF16>(stream, p, grid);
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
