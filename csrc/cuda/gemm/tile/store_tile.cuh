// Writes a warpgroup's sums to 64 rows of the output, through shared memory.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_STORE_TILE_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_STORE_TILE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/product/product.h"
#include "cuda/gemm/tile/async_copy.cuh"
#include "cuda/gemm/tile/tile_schedule.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kStoredRows = 64;
constexpr int kChunkBytes = kStoredRows * 128;  // lines of 128 bytes, swizzled like tensor copies
constexpr int kStagingBytes = 2 * kChunkBytes;  // one chunk is written while the other is read

struct OutShape {
  void* data;
  int32_t rows;
  int32_t columns;
  const void* bias;  // [experts, columns] or null
  FloatType bias_type;
  bool adds;  // tiles are added to the output; only with output by expert
};

__device__ __forceinline__ float2 LoadPair(const void* values, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kBF16:
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
          static_cast<const __nv_bfloat16*>(values) + index));
    case FloatType::kF16:
      return __half22float2(
          *reinterpret_cast<const __half2*>(static_cast<const __half*>(values) + index));
    default:
      break;
  }
  return *reinterpret_cast<const float2*>(static_cast<const float*>(values) + index);
}

template <typename Out>
__device__ __forceinline__ uint32_t RoundPair(float first, float second) {
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Rounds sums to words of two 16-bit values. Even words are of a thread's first row, odd words of
// its second.
template <typename Out, int kWords>
__device__ __forceinline__ void RoundSums(const float* sums, uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = RoundPair<Out>(sums[2 * i], sums[2 * i + 1]);
}

constexpr int kChunkWords = 16;  // words of 16-bit values that a thread has of a chunk

// Writes a chunk of 16-bit values to shared memory.
__device__ __forceinline__ void WriteWords(uint32_t chunk, const uint32_t* words) {
  const uint32_t lane = threadIdx.x % 32;
  // Lane l gives the address of a line of matrix l / 8. Matrices 0 and 1 are rows 0 to 7 and 8 to
  // 15 of 8 columns, 2 and 3 are the same rows of the next 8 columns.
  const uint32_t line = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int pair = 0; pair < kChunkWords / 4; ++pair) {
    const uint32_t vector = 2 * pair + lane / 16;
    const uint32_t to = chunk + line * 128 + ((vector ^ line % 8) << 4);
    const uint32_t* w = words + 4 * pair;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  }
}

// Writes the sums of a chunk's columns to shared memory. After a product, thread t has rows t / 4
// and t / 4 + 8 of its warp's 16, and of every 8 columns 2 * (t % 4) and 2 * (t % 4) + 1: four sums
// per 8 columns.
template <typename Out>
__device__ __forceinline__ void WriteChunk(uint32_t chunk, const float* sums) {
  if constexpr (sizeof(Out) == 2) {
    uint32_t words[kChunkWords];
    RoundSums<Out>(sums, words);
    WriteWords(chunk, words);
  } else {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp_rows = threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t line = warp_rows + lane / 4 + 8 * half;
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        const uint32_t vector = 2 * eight + lane % 4 / 2;
        const uint32_t to = chunk + line * 128 + ((vector ^ line % 8) << 4) + lane % 2 * 8;
        const float* s = sums + 4 * eight + 2 * half;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(s[0]), "f"(s[1]) : "memory");
      }
    }
  }
}

struct OutRows {
  void* data;
  int32_t columns;
  int32_t end;  // columns from here on are not stored
};

// Copies the first `rows` lines of a chunk to the output, without columns past its end.
template <typename Out>
__device__ __forceinline__ void CopyChunk(const OutRows& out, uint32_t chunk, int32_t row,
                                          int32_t rows, int32_t column) {
  constexpr int kVector = 16 / sizeof(Out);
#pragma unroll
  for (int i = 0; i < kStoredRows / 16; ++i) {
    const int line = i * 16 + threadIdx.x % 128 / 8;
    const int vector = threadIdx.x % 8;
    const int32_t at = column + vector * kVector;
    if (line >= rows || at >= out.end) continue;
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(chunk + line * 128 + ((vector ^ line % 8) << 4))
                 : "memory");
    Out* to = static_cast<Out*>(out.data) + static_cast<int64_t>(row + line) * out.columns + at;
    *reinterpret_cast<uint4*>(to) = bits;
  }
}

// Adds the bias to the sums of the columns from `column` on.
template <int kSums>
__device__ __forceinline__ void AddBias(const OutShape& out, int32_t expert, int32_t column,
                                        float* sums) {
  const int64_t first = static_cast<int64_t>(expert) * out.columns;
#pragma unroll
  for (int eight = 0; eight < kSums / 4; ++eight) {
    const int32_t at = column + eight * 8 + threadIdx.x % 4 * 2;
    if (at >= out.columns) continue;
    const float2 bias = LoadPair(out.bias, out.bias_type, first + at);
    sums[4 * eight] += bias.x;
    sums[4 * eight + 1] += bias.y;
    sums[4 * eight + 2] += bias.x;
    sums[4 * eight + 3] += bias.y;
  }
}

__device__ __forceinline__ void PutBox(const OutShape& out, const CUtensorMap* map, Coordinates at,
                                       uint32_t shared) {
  if (out.adds) {
    AddBox(map, at, shared);
  } else {
    StoreBox(map, at, shared);
  }
}

// Stores this warpgroup's rows of a tile. Copies may still read `staging` when this returns. With
// kByExpert the output is [experts, rows, columns], or two halves for a pair, and tensor copies
// write no rows past a plane's end; otherwise it is one array. `turn` counts this warpgroup's
// chunks of all tiles.
template <bool kByExpert, typename Out, int kSums>
__device__ __forceinline__ void StoreTile(const OutShape& out, const Halves& maps, const Tile& tile,
                                          int warpgroup, uint8_t* staging,
                                          const float (&sums)[kSums], uint32_t* turn) {
  constexpr int kChunkColumns = 128 / sizeof(Out);
  constexpr int kChunkSums = kChunkColumns / 2;
  const int32_t row = tile.row + warpgroup * kStoredRows;
  const int32_t rows = tile.row_end - row;
  if (rows <= 0) return;
  const bool leads = threadIdx.x % 128 == 0;
  const bool whole = kByExpert || rows >= kStoredRows;
#pragma unroll
  for (int i = 0; i < kSums / kChunkSums; ++i) {
    const int32_t column = tile.column + i * kChunkColumns;
    if (column < out.columns) {
      const uint32_t chunk = SharedAddress(staging) + (*turn)++ % 2 * kChunkBytes;
      if (leads) WaitStoresRead<1>();
      SyncWarpgroup(warpgroup);
      float part[kChunkSums];
#pragma unroll
      for (int j = 0; j < kChunkSums; ++j) part[j] = sums[i * kChunkSums + j];
      if (!kByExpert && out.bias != nullptr) AddBias<kChunkSums>(out, tile.expert, column, part);
      WriteChunk<Out>(chunk, part);
      FenceSharedForCopies();
      SyncWarpgroup(warpgroup);
      if (!whole) {
        CopyChunk<Out>({out.data, out.columns, out.columns}, chunk, row, rows, column);
      }
      if (leads) {
        if (whole) {
          Coordinates at{column, row, kByExpert ? tile.expert : 0};
          if constexpr (kByExpert) {
            const CUtensorMap* map = FindHalf(maps, &at);
            PutBox(out, map, at, chunk);
          } else {
            StoreBox(maps.first, at, chunk);
          }
        }
        // Commit an empty group too, because waits count one group per chunk.
        CommitStores();
      }
    }
  }
}

// Stores this warpgroup's rows of a tile of [experts, rows, columns] at once. `staging` has room
// for all of them, and copies run on while the warpgroup multiplies.
template <typename Out, int kSums>
__device__ __forceinline__ void StoreWholeTile(const OutShape& out, const Halves& maps,
                                               const Tile& tile, int warpgroup, uint8_t* staging,
                                               const float (&sums)[kSums]) {
  constexpr int kChunkColumns = 128 / sizeof(Out);
  constexpr int kChunkSums = kChunkColumns / 2;
  constexpr int kChunks = kSums / kChunkSums;
  const int32_t row = tile.row + warpgroup * kStoredRows;
  if (row >= tile.row_end) return;
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) WaitStoresRead<0>();
  SyncWarpgroup(warpgroup);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    WriteChunk<Out>(SharedAddress(staging) + i * kChunkBytes, sums + i * kChunkSums);
  }
  FenceSharedForCopies();
  SyncWarpgroup(warpgroup);
  if (!leads) return;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int32_t column = tile.column + i * kChunkColumns;
    if (column < out.columns) {
      Coordinates at{column, row, tile.expert};
      const CUtensorMap* map = FindHalf(maps, &at);
      PutBox(out, map, at, SharedAddress(staging) + i * kChunkBytes);
    }
  }
  CommitStores();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_STORE_TILE_CUH_
