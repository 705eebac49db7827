// Stores a first product of experts, and the activation of it.
//
// A tile has 128 columns of the gate and the same columns of up, so a thread has both sums of a
// value. They are rounded before the activation, and the activation before it is quantized. So the
// bits are the same as with launches of rows/activation.h or rows/activation_quantize.h.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_STORE_ACTIVATED_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_STORE_ACTIVATED_CUH_

#include "cuda/gemm/tile/store_tile.cuh"
#include "cuda/rows/values/activation_values.cuh"
#include "cuda/rows/values/fp8.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kGateColumns = kTileColumns / 2;            // columns of each half of a tile
constexpr int kHalfWords = kTileColumns / 8;              // words that a thread has of a half
constexpr int kRowWords = kHalfWords / 2;                 // of one of its two rows
constexpr int kChunkWidth = 128 / sizeof(__nv_bfloat16);  // columns of a chunk
constexpr int kHalfChunks = kGateColumns / kChunkWidth;

struct ActivationShape {
  ActivationFunction function;
  int32_t width;         // columns of the gate, and of up
  const float* weights;  // [rows] or null
  void* inner;           // [rows, width]; null: the product has no activation
  float* scale;          // [rows, width / kGateColumns] if `inner` is 8-bit floats
  bool power_of_two;
};

// The activation's words of one of a thread's rows, in groups of 8 values.
template <RowType kType>
using RowPieces = rows::Piece<kType>[kRowWords / 4];

// Replaces the gate's words in `inner` by those of the activation.
template <RowType kType>
__device__ __forceinline__ void ActivateWords(ActivationFunction function,
                                              const float (&weights)[2],
                                              const uint32_t (&up)[kHalfWords],
                                              uint32_t (&inner)[kHalfWords]) {
  const auto vector = [](const uint32_t* words) {
    return make_uint4(words[0], words[2], words[4], words[6]);
  };
  rows::WithFunction(function, [&](auto f) {
#pragma unroll
    for (int i = 0; i < kHalfWords / 4; ++i) {
      const int first = i / 2 * 8 + i % 2;
      const uint4 values = rows::ValuesOf<kType, true, decltype(f)>(
          vector(inner + first), vector(up + first), weights[i % 2]);
      inner[first] = values.x;
      inner[first + 2] = values.y;
      inner[first + 4] = values.z;
      inner[first + 6] = values.w;
    }
  });
}

// Returns the largest finite magnitudes of a thread's two rows, in the halves of a word. Four lanes
// share a row.
template <RowType kType>
__device__ __forceinline__ uint32_t LargestOfRows(const RowPieces<kType> (&pieces)[2]) {
  const auto over = [&](bool only_finite) {
    uint32_t size = 0;
#pragma unroll
    for (int i = 0; i < kRowWords / 4; ++i) {
      const auto of = [&](int row) {
        return only_finite ? pieces[row][i].LargestFinite() : pieces[row][i].Largest();
      };
      size = __vmaxu2(size, of(0) | of(1) << 16);
    }
    size = __vmaxu2(size, __shfl_xor_sync(0xFFFFFFFFu, size, 1));
    return __vmaxu2(size, __shfl_xor_sync(0xFFFFFFFFu, size, 2));
  };
  const uint32_t size = over(/*only_finite=*/false);
  const bool finite = __vcmpgeu2(size, rows::Magnitude<kType>::kInfinity * 0x10001u) == 0;
  if (__all_sync(0xFFFFFFFFu, finite)) return size;
  return over(/*only_finite=*/true);
}

// Writes an activation as 8-bit floats to a chunk of shared memory, and its scales to the output.
template <RowType kType>
__device__ __forceinline__ void WriteQuantized(const ActivationShape& activation,
                                               const uint32_t (&words)[kHalfWords], int32_t row,
                                               int32_t rows, int32_t column, uint32_t chunk) {
  const int lane = threadIdx.x % 32;
  const int line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  RowPieces<kType> pieces[2];
#pragma unroll
  for (int i = 0; i < kHalfWords; ++i) pieces[i % 2][i / 8].words[i / 2 % 4] = words[i];
  const uint32_t largest = LargestOfRows<kType>(pieces);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float amax = rows::Magnitude<kType>::ToFloat(largest >> 16 * half & 0xFFFFu);
    const float scale = Fp8<Fp8Format::kE4M3>::ScaleOf(amax, activation.power_of_two);
    const float inverse = __frcp_rn(scale);
    const int at = line + 8 * half;
    if (lane % 4 == half && at < rows) {
      const int32_t tiles = activation.width / kGateColumns;
      activation.scale[static_cast<int64_t>(row + at) * tiles + column / kGateColumns] = scale;
    }
#pragma unroll
    for (int i = 0; i < kRowWords / 4; ++i) {
      const uint2 bytes =
          rows::Convert<kType, Fp8Format::kE4M3>(pieces[half][i], [=](int) { return inverse; });
      // A lane has two bytes of each 8 columns.
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        const uint32_t pair = (eight < 2 ? bytes.x : bytes.y) >> eight % 2 * 16;
        const uint32_t vector = 2 * i + eight / 2;
        const uint32_t to =
            chunk + at * 128 + ((vector ^ at % 8) << 4) + eight % 2 * 8 + lane % 4 * 2;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(pair))
                     : "memory");
      }
    }
  }
}

// Stores this warpgroup's rows of a tile of gate and up, unless the product's output is null, and
// of their activation. Copies may still read `staging` when this returns. `turn` counts this
// warpgroup's chunks of all tiles.
template <typename Out, bool kQuantizes>
__device__ __forceinline__ void StoreActivated(const OutShape& out,
                                               const ActivationShape& activation,
                                               const CUtensorMap* out_map,
                                               const CUtensorMap* inner_map, const Tile& tile,
                                               int warpgroup, uint8_t* staging,
                                               float (&sums)[kTileColumns / 2], uint32_t* turn) {
  constexpr RowType kType = std::is_same_v<Out, __nv_bfloat16> ? RowType::kBF16 : RowType::kF16;
  const int32_t row = tile.row + warpgroup * kStoredRows;
  const int32_t rows = tile.row_end - row;
  const int32_t width = activation.width;
  if (rows <= 0 || tile.column >= width) return;
  const bool leads = threadIdx.x % 128 == 0;
  float weights[2] = {1, 1};
  if (activation.weights != nullptr) {
    const int line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (line + 8 * half < rows) weights[half] = __ldg(activation.weights + row + line + 8 * half);
    }
  }
  // Stores one chunk that `write(chunk)` writes to shared memory; its first column is `column` of a
  // half that begins at `half` in the output's rows.
  const auto store = [&](auto value, void* data, const CUtensorMap* map, int32_t columns,
                         int32_t half, int32_t column, const auto& write) {
    using Value = decltype(value);
    const bool whole = rows >= kStoredRows && column + 128 / int{sizeof(Value)} <= width;
    const uint32_t chunk = SharedAddress(staging) + (*turn)++ % 2 * kChunkBytes;
    if (leads) WaitStoresRead<1>();
    SyncWarpgroup(warpgroup);
    write(chunk);
    FenceSharedForCopies();
    SyncWarpgroup(warpgroup);
    if (!whole) {
      CopyChunk<Value>({data, columns, half + width}, chunk, row, rows, half + column);
    }
    if (!leads) return;
    if (whole) StoreBox(map, {half + column, row, 0}, chunk);
    CommitStores();
  };
  // Stores the i-th chunk of a half, or of the activation.
  const auto store_words = [&](void* data, const CUtensorMap* map, int32_t columns, int32_t half,
                               int i, const uint32_t (&words)[kHalfWords]) {
    const int32_t column = tile.column + i * kChunkWidth;
    if (!kQuantizes && column >= width) return;
    store(Out{}, data, map, columns, half, column,
          [&](uint32_t chunk) { WriteWords(chunk, words + i * kChunkWords); });
  };
  if (out.bias != nullptr) {
    AddBias<kTileColumns / 4>(out, tile.expert, tile.column, sums);
    AddBias<kTileColumns / 4>(out, tile.expert, width + tile.column, sums + kTileColumns / 4);
  }
  uint32_t gate[kHalfWords], up[kHalfWords], inner[kHalfWords];
  RoundSums<Out>(sums, gate);
  RoundSums<Out>(sums + kTileColumns / 4, up);
  const auto store_product = [&](int i) {
    if (out.data == nullptr) return;
    store_words(out.data, out_map, out.columns, 0, i, gate);
    store_words(out.data, out_map, out.columns, width, i, up);
  };
  store_product(0);
  // Copies read the first chunks meanwhile.
#pragma unroll
  for (int i = 0; i < kHalfWords; ++i) inner[i] = gate[i];
  ActivateWords<kType>(activation.function, weights, up, inner);
#pragma unroll
  for (int i = 1; i < kHalfChunks; ++i) store_product(i);
  if constexpr (kQuantizes) {
    store(uint8_t{}, activation.inner, inner_map, width, 0, tile.column, [&](uint32_t chunk) {
      WriteQuantized<kType>(activation, inner, row, rows, tile.column, chunk);
    });
  } else {
#pragma unroll
    for (int i = 0; i < kHalfChunks; ++i) {
      store_words(activation.inner, inner_map, width, 0, i, inner);
    }
  }
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_STORE_ACTIVATED_CUH_
