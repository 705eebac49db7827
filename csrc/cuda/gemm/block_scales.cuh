// Scales of 128 contracted values, on their way from memory to the sums they belong to.
//
// The loading warp copies them beside the operands of a stage: a multiplying warp that read them
// itself would wait for memory wherever a tile begins and wherever a line of scales ends.
#ifndef EP_RUNTIME_CUDA_GEMM_BLOCK_SCALES_CUH_
#define EP_RUNTIME_CUDA_GEMM_BLOCK_SCALES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/async_copy.cuh"
#include "cuda/gemm/kernel_arguments.cuh"
#include "cuda/gemm/tile_schedule.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kScaledValues = 128;               // along each dim of a weight that share a scale
constexpr int kTileParts = 256 / kScaledValues;  // of a tile's columns

// Of one stage.
struct StageScales {
  float rows[kTileRows];
  float weight[kTileParts];
  float unused[4 - kTileParts];  // a multiple of 16 bytes
};

// Where a tile's scales are: every lane of the loading warp has four rows, the first ones a part of
// the tile's columns too.
class ScaleSource {
 public:
  __device__ ScaleSource(const Scales& scales, const Tile& tile)
      : rhs_step_(scales.rhs_depth), has_rhs_(static_cast<int32_t>(threadIdx.x % 32) < kTileParts) {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i) {
      const int32_t row = min(tile.row + i * 32 + lane, scales.last_row);
      lhs_[i] = scales.lhs + row * static_cast<int64_t>(scales.lhs_width);
    }
    const int32_t column = tile.column / kScaledValues + (has_rhs_ ? lane : 0);
    rhs_ = scales.rhs + static_cast<int64_t>(tile.expert) * scales.rhs_plane +
           min(column, scales.last_column) * scales.rhs_column;
  }

  // Begins to copy those of contracted block `block`. Every lane arrives at `full` when its own are
  // there.
  __device__ __forceinline__ void Load(int32_t block, StageScales* to, uint32_t full) const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i) {
      CopyFloat(SharedAddress(&to->rows[i * 32 + lane]), lhs_[i] + block);
    }
    if (has_rhs_) {
      CopyFloat(SharedAddress(&to->weight[lane]), rhs_ + static_cast<int64_t>(block) * rhs_step_);
    }
    ArriveAfterCopies(full);
  }

 private:
  const float* lhs_[kTileRows / 32];
  const float* rhs_;
  const int32_t rhs_step_;
  const bool has_rhs_;
};

// What sums of a block are multiplied by: those of this thread's two rows, which are 8 apart.
struct Factors {
  float of[2];
};

__device__ __forceinline__ Factors BlockFactors(const StageScales& scales, int warpgroup,
                                                int part) {
  const int row = warpgroup * kTileRows / 2 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float weight = scales.weight[part];
  return {{scales.rows[row] * weight, scales.rows[row + 8] * weight}};
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_BLOCK_SCALES_CUH_
