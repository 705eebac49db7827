// Stages of a tile's operands in shared memory: a cluster loads them, its warpgroups read them,
// then release them.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_STAGES_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_STAGES_CUH_

#include "cuda/gemm/tile/async_copy.cuh"
#include "cuda/gemm/tile/tile_schedule.cuh"
#include "cuda/gemm/tile/wgmma.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kMultipliers = 2;  // multiplying warpgroups
constexpr int kThreads = 128 * (kMultipliers + 1);

// Loads one stage of a tile's operands. Each block loads half of the operand that the cluster
// shares. `skipped` is the number of columns between the halves of a tile's columns.
template <class Traits>
__device__ __forceinline__ void LoadStage(const CUtensorMap* lhs_map, const Halves& rhs_maps,
                                          const Tile& tile, int32_t skipped, int32_t depth,
                                          uint32_t rank, uint32_t stage, uint32_t full) {
  constexpr uint16_t kBoth = 3;
  ExpectBytes(full, Traits::kStageBytes);
#pragma unroll
  for (int piece = 0; piece < Traits::kLhsPieces; ++piece) {
    const int32_t row = tile.row + piece * kPieceSide;
    const Coordinates at = Traits::kLhs == Along::kContracted ? Coordinates{depth, row, 0}
                                                              : Coordinates{row, depth, 0};
    const uint32_t to = stage + piece * kPieceBytes;
    if (!tile.share_rows) {
      LoadBox(lhs_map, at, to, full);
    } else if (piece / (Traits::kLhsPieces / kClusterBlocks) == rank) {
      LoadBoxInto(kBoth, lhs_map, at, to, full);
    }
  }
#pragma unroll
  for (int piece = 0; piece < Traits::kRhsPieces; ++piece) {
    const int32_t column =
        tile.column + piece * kPieceSide + (piece < Traits::kRhsPieces / 2 ? 0 : skipped);
    const int32_t plane = Traits::kRagged ? 0 : tile.expert;
    Coordinates at = Traits::kRhs == Along::kContracted ? Coordinates{depth, column, plane}
                                                        : Coordinates{column, depth, plane};
    const CUtensorMap* rhs_map = Traits::kRagged ? rhs_maps.first : FindHalf(rhs_maps, &at);
    const uint32_t to = stage + Traits::kLhsBytes + piece * kPieceBytes;
    if (tile.share_rows) {
      LoadBox(rhs_map, at, to, full);
    } else if (piece / (Traits::kRhsPieces / kClusterBlocks) == rank) {
      LoadBoxInto(kBoth, rhs_map, at, to, full);
    }
  }
}

// Sets the lines from `begin` on to zero in each of `pieces` pieces, before this warpgroup's next
// products. Another warpgroup that shares a piece writes the same zeros.
__device__ __forceinline__ void ClearLines(uint8_t* first_piece, int pieces, int begin) {
  for (int piece = 0; piece < pieces; ++piece) {
    auto* vectors = reinterpret_cast<uint4*>(first_piece + piece * kPieceBytes);
    constexpr int kVectors = 128 / sizeof(uint4);
    for (int i = begin * kVectors + threadIdx.x % 128; i < kPieceSide * kVectors; i += 128) {
      vectors[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Releases the stage to the cluster's loaders: one lane arrives in each block.
__device__ __forceinline__ void ReleaseStage(uint32_t empty) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < kClusterBlocks) ArriveAt(empty, lane);
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_STAGES_CUH_
