// Accumulates products of 8-bit operands in f32. Sums of 128 contracted elements leave the tensor
// cores, are multiplied by the scales if blocks have scales, and are added to totals in registers.
//
// A tile's columns are multiplied in parts of 128, one after another: a warpgroup's registers have
// room for the sums of a whole tile and the products of one part. Tiles of 128 columns would be
// bound by their loads. The warpgroups add at the same time, because taking turns is slower.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_PROMOTED_SUMS_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_PROMOTED_SUMS_CUH_

#include <type_traits>

#include "cuda/gemm/kernels/block_scales.cuh"
#include "cuda/gemm/kernels/instances.h"
#include "cuda/gemm/kernels/stages.cuh"
#include "cuda/gemm/tile/wgmma.cuh"
#include "cuda/gemm/tile/work_queue.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kPartColumns = kScaledValues;
constexpr int kPartSums = kPartColumns / 2;  // sums of a thread
constexpr uint64_t kPartOffset = (kPartColumns / kPieceSide * kPieceBytes) >> 4;

// Starts the products of one stage with 128 columns; they replace `sums`.
template <class Traits>
__device__ __forceinline__ void BeginPart(uint64_t lhs, uint64_t rhs, float (&sums)[kPartSums]) {
  constexpr int kSteps = 128 / 32;  // bytes of a line / bytes of one instruction
  constexpr uint64_t kStep = StepOffset<Along::kContracted>();
  HoldSums(sums);
  FenceOperands();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Multiply8<typename Traits::Lhs, typename Traits::Rhs>(sums, lhs + step * kStep,
                                                          rhs + step * kStep, step > 0);
  }
  CommitProducts();
}

// total += sums times factors.
template <Summing kSumming>
__device__ __forceinline__ void Promote(const float (&sums)[kPartSums], const Factors& factors,
                                        float* total) {
#pragma unroll
  for (int i = 0; i < kPartSums; ++i) {
    // Multiplies by one scale after the other, because the product of two small scales may
    // underflow. Sums with two scales for each block multiply the scales first, which is faster.
    if constexpr (kSumming == Summing::kByGroup) {
      total[i] += sums[i] * factors.of[0] * factors.of[1];
    } else if constexpr (kSumming == Summing::kByBlock) {
      total[i] += sums[i] * factors.of[i / 2 % 2];
    } else if constexpr (kSumming == Summing::kByTile) {
      total[i] += sums[i] * factors.of[0];
    } else {
      total[i] += sums[i];
    }
  }
}

struct Nothing {
  __device__ Nothing(const Scales&, const Work&) {}
};

// Reads the factors of a tile's products, stage by stage and one stage ahead.
class TileScales {
 public:
  __device__ TileScales(const Scales& scales, const Work& work)
      : lhs_(scales.lhs + At(work, scales.lhs_width) + work.row / kScaledValues),
        rhs_(scales.rhs + At(work, scales.rhs_depth)),
        lhs_step_(scales.lhs_width),
        rhs_step_(scales.rhs_depth),
        left_(work.size / kScaledValues) {
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) {
      column_[part] = min(work.column / kScaledValues + part, scales.rhs_depth - 1);
    }
    // A tile may be past the last row: read any valid scales then.
    if (work.row / kScaledValues >= scales.lhs_width) lhs_ = scales.lhs;
    Read();
  }

  __device__ __forceinline__ void Next(float (&factors)[kTileParts]) {
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) factors[part] = of_row_ * of_columns_[part];
    if (--left_ == 0) return;
    lhs_ += lhs_step_;
    rhs_ += rhs_step_;
    Read();
  }

 private:
  __device__ static int64_t At(const Work& work, int32_t width) {
    return static_cast<int64_t>(work.start / kScaledValues) * width;
  }
  __device__ __forceinline__ void Read() {
    of_row_ = LoadEarly(lhs_);
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) {
      of_columns_[part] = LoadEarly(rhs_ + column_[part]);
    }
  }

  const float* lhs_;
  const float* rhs_;
  const int32_t lhs_step_;
  const int32_t rhs_step_;
  int32_t left_;
  int32_t column_[kTileParts];
  float of_row_;
  float of_columns_[kTileParts];
};

// total += the products of one range, stage by stage.
template <class Traits, class Memory>
__device__ __forceinline__ void SumPromoted(const KernelArguments& args, const Work& work,
                                            int warpgroup, Memory* memory,
                                            RingPlace<Traits::kStages>* place,
                                            float (&total)[kTileColumns / 2]) {
  if (work.size == 0) return;
  Factors factors{{1, 1}};
  if constexpr (Traits::kSumming == Summing::kByGroup) {
    factors.of[0] = LoadEarly(args.scales.lhs + work.group);
    factors.of[1] = LoadEarly(args.scales.rhs + work.group);
  }
  std::conditional_t<Traits::kByTile, TileScales, Nothing> scales(args.scales, work);
  float sums[kPartSums], of_parts[kTileParts];
#pragma unroll
  for (int i = 0; i < kPartSums; ++i) sums[i] = 0;
#pragma unroll 1
  for (int32_t done = 0; done < work.size; done += Traits::kDepth, place->Advance()) {
    WaitBarrier(SharedAddress(&memory->full[place->stage]), place->parity);
    const uint32_t stage = SharedAddress(memory->stages[place->stage]);
    const uint64_t lhs = DescribeOperand<Along::kContracted>(stage + warpgroup * kPieceBytes);
    const uint64_t rhs = DescribeOperand<Along::kContracted>(stage + Traits::kLhsBytes);
    if constexpr (Traits::kByTile) scales.Next(of_parts);
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) {
      if constexpr (Traits::kByBlock) {
        factors = BlockFactors(memory->scales[place->stage], warpgroup, part);
      } else if constexpr (Traits::kByTile) {
        factors.of[0] = of_parts[part];
      }
      BeginPart<Traits>(lhs, rhs + part * kPartOffset, sums);
      WaitProducts<0>();
      HoldSums(sums);
      if (part + 1 == kTileParts) ReleaseStage(SharedAddress(&memory->empty[place->stage]));
      Promote<Traits::kSumming>(sums, factors, total + part * kPartSums);
    }
  }
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_PROMOTED_SUMS_CUH_
