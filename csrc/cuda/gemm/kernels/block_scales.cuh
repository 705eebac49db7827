// Loads block scales, one per 128 contracted values, next to the operands whose sums they multiply.
//
// Two extra warps read the scales, four blocks of a row at a time, and put one block's scales next
// to the operands of a stage. They read several blocks at a time, because each access takes memory
// bandwidth that the products need.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_BLOCK_SCALES_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_BLOCK_SCALES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/kernels/kernel_arguments.cuh"
#include "cuda/gemm/tile/async_copy.cuh"
#include "cuda/gemm/tile/ring.cuh"
#include "cuda/gemm/tile/tile_schedule.cuh"
#include "cuda/gemm/tile/work_queue.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kScaledValues = 128;  // values of a weight, along each dim, that share a scale
constexpr int kTileParts = 256 / kScaledValues;  // parts of a tile's columns, summed one after
                                                 // another
constexpr int kReadBlocks = 4;                   // blocks of a row that are read at a time
constexpr int kScaleWarps = 2;
constexpr int kWarpRows = kTileRows / kScaleWarps;

// Scales of one stage.
struct StageScales {
  float rows[kTileRows];
  float weight[kTileParts];
  float unused[4 - kTileParts];  // pads to a multiple of 16 bytes
};

// Loads a value early: volatile asm keeps the compiler from moving the load past later waits.
__device__ __forceinline__ float LoadEarly(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ void LoadEarly(const float* from, float (&values)[4]) {
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "l"(from));
}

// The scales of a tile that one warp reads: each lane reads two rows' scales, and the first lanes
// of the first warp also read the weight's scales, a block per lane.
class ScaleSource {
 public:
  // Scales of kReadBlocks blocks.
  struct Read {
    float rows[kWarpRows / 32][kReadBlocks];
    float weight;
  };

  __device__ ScaleSource(const Scales& scales, const Work& work, int warp)
      : lhs_(scales.lhs),
        line_(warp * kWarpRows + threadIdx.x % 32),
        row_(work.row + line_),
        last_row_(scales.last_row),
        blocks_(scales.lhs_width),
        rhs_step_(scales.rhs_depth) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t column = work.column / kScaledValues + lane / kReadBlocks * scales.part_step;
    rhs_ = scales.rhs + static_cast<int64_t>(work.expert) * scales.rhs_plane +
           min(column, scales.last_column) * scales.rhs_column;
    whole_ =
        (reinterpret_cast<uintptr_t>(scales.lhs) | static_cast<uint32_t>(blocks_) * 4) % 16 == 0;
  }

  // Starts to read the scales of kReadBlocks blocks from `first` on.
  __device__ __forceinline__ void Begin(int32_t first, Read* read) const {
#pragma unroll
    for (int i = 0; i < kWarpRows / 32; ++i) {
      const float* row = lhs_ + min(row_ + 32 * i, last_row_) * static_cast<int64_t>(blocks_);
      if (whole_) {
        LoadEarly(row + first, read->rows[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kReadBlocks; ++j) {
          read->rows[i][j] = LoadEarly(row + min(first + j, blocks_ - 1));
        }
      }
    }
    const int32_t block = min(first + static_cast<int32_t>(threadIdx.x % kReadBlocks), blocks_ - 1);
    if (line_ < kTileParts * kReadBlocks) {
      read->weight = LoadEarly(rhs_ + static_cast<int64_t>(block) * rhs_step_);
    }
  }

  // Puts the scales of the j-th block into `stage`.
  __device__ __forceinline__ void Put(const Read& read, int j, StageScales* stage) const {
#pragma unroll
    for (int i = 0; i < kWarpRows / 32; ++i) stage->rows[line_ + i * 32] = read.rows[i][j];
    if (line_ < kTileParts * kReadBlocks && line_ % kReadBlocks == j) {
      stage->weight[line_ / kReadBlocks] = read.weight;
    }
  }

 private:
  const float* const lhs_;
  const int32_t line_;  // this lane's first row in the tile
  const int32_t row_;
  const int32_t last_row_;
  const float* rhs_;
  const int32_t blocks_;  // contracted blocks
  const int32_t rhs_step_;
  bool whole_;  // true: one 16-byte read takes four scales of a row
};

// Runs in all lanes of each of the two extra warps. Puts scales of all queued work next to the
// work's operands.
template <class Memory>
__device__ __forceinline__ void LoadScales(const Scales& scales, int warp, Memory* memory) {
  RingPlace<kQueuedWork> next;
  RingPlace<Memory::kStages> place;
  while (true) {
    const Work work = TakeWork(&next, &memory->queue);
    if (work.expert < 0) return;
    const ScaleSource source(scales, work, warp);
    const int32_t blocks = (work.size + kScaledValues - 1) / kScaledValues;
    ScaleSource::Read ahead{};
    if (blocks > 0) source.Begin(0, &ahead);
#pragma unroll 1
    for (int32_t first = 0; first < blocks; first += kReadBlocks) {
      const ScaleSource::Read read = ahead;
      if (first + kReadBlocks < blocks) source.Begin(first + kReadBlocks, &ahead);
#pragma unroll
      for (int j = 0; j < kReadBlocks; ++j) {
        if (first + j >= blocks) break;
        WaitBarrier(SharedAddress(&memory->empty[place.stage]), place.parity ^ 1);
        source.Put(read, j, &memory->scales[place.stage]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&memory->full[place.stage]));
        place.Advance();
      }
    }
  }
}

// Factors of a block's sums, for this thread's two rows, which are 8 apart.
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

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_BLOCK_SCALES_CUH_
