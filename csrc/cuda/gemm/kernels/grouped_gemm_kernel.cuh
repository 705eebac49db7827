// One persistent kernel for the products of product.h.
//
// A block is a warpgroup that loads and two that multiply, each 64 rows of a 128-row output tile;
// two blocks are a cluster and load what their tiles share once. The multiplying warpgroups never
// wait for each other: while one stores its rows the other has the tensor cores.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/kernels/kernel_arguments.cuh"
#include "cuda/gemm/product/product.h"
#include "cuda/gemm/tile/async_copy.cuh"
#include "cuda/gemm/tile/ring.cuh"
#include "cuda/gemm/tile/store_tile.cuh"
#include "cuda/gemm/tile/tile_schedule.cuh"
#include "cuda/gemm/tile/wgmma.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kMultipliers = 2;  // warpgroups
constexpr int kThreads = 128 * (kMultipliers + 1);
// Registers of a thread, which sum to what a block has.
constexpr int kLoaderRegisters = 40;
constexpr int kMultiplierRegisters = 232;

template <GemmProduct product, typename In, typename Result>
struct KernelTraits {
  using T = In;
  using Out = Result;
  static constexpr GemmProduct kProduct = product;
  static constexpr bool kRagged = product == GemmProduct::kWeightGrad;  // the contracted dim is
  static constexpr Along kLhs = kRagged ? Along::kOther : Along::kContracted;
  static constexpr Along kRhs =
      product == GemmProduct::kDataGrad ? Along::kContracted : Along::kOther;
  static constexpr int kLhsPieces = kTileRows / kPieceSide;
  static constexpr int kRhsPieces = kTileColumns / kPieceSide;
  static constexpr int kLhsBytes = kLhsPieces * kPieceBytes;
  static constexpr int kStageBytes = (kLhsPieces + kRhsPieces) * kPieceBytes;
  static constexpr int kStages = (192 << 10) / kStageBytes;
};

template <class Traits>
struct SharedMemory {
  uint8_t stages[Traits::kStages][Traits::kStageBytes];
  uint8_t staging[kMultipliers][kStagingBytes];
  uint64_t full[Traits::kStages];   // the stage's bytes are there
  uint64_t empty[Traits::kStages];  // nobody in the cluster reads the stage
  uint16_t order[Traits::kRagged ? kMaxExperts : 1];
};

template <class Traits>
__device__ __forceinline__ auto MakeSchedule(const KernelArguments& args, const uint16_t* order,
                                             Cluster cluster) {
  const int32_t column_tiles = (args.out.columns + kTileColumns - 1) / kTileColumns;
  if constexpr (Traits::kRagged) {
    return ExpertTileSchedule(order, args.groups.num_experts, args.out.rows, column_tiles,
                              args.band, cluster);
  } else {
    return RowTileSchedule(args.groups, column_tiles, args.band, cluster);
  }
}

// Calls body(start, size) for every range of the contracted dim that a tile sums over.
template <class Traits, class Body>
__device__ __forceinline__ void ForEachRange(const KernelArguments& args, int expert,
                                             const Body& body) {
  if constexpr (Traits::kRagged) {
    for (int group = expert; group < args.groups.num_groups; group += args.groups.num_experts) {
      const Rows rows = FindRows(args.groups, group);
      // The same in all lanes, and the compiler sees it: products are not to be in divergent code.
      body(__shfl_sync(0xFFFFFFFFu, rows.start, 0), __shfl_sync(0xFFFFFFFFu, rows.size, 0));
    }
  } else {
    body(0, args.depth);
  }
}

// Loads one stage of a tile's operands; what the cluster shares, each block loads half of.
template <class Traits>
__device__ __forceinline__ void LoadStage(const CUtensorMap* lhs_map, const Halves& rhs_maps,
                                          const Tile& tile, int32_t depth, uint32_t rank,
                                          uint32_t stage, uint32_t full) {
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
    const int32_t column = tile.column + piece * kPieceSide;
    const int32_t plane = Traits::kRagged ? 0 : tile.expert;
    Coordinates at = Traits::kRhs == Along::kContracted ? Coordinates{depth, column, plane}
                                                        : Coordinates{column, depth, plane};
    const CUtensorMap* rhs_map = Traits::kRagged ? rhs_maps.first : FindHalf(rhs_maps, &at.x);
    const uint32_t to = stage + Traits::kLhsBytes + piece * kPieceBytes;
    if (tile.share_rows) {
      LoadBox(rhs_map, at, to, full);
    } else if (piece / (Traits::kRhsPieces / kClusterBlocks) == rank) {
      LoadBoxInto(kBoth, rhs_map, at, to, full);
    }
  }
}

// The loading warp, all its lanes.
template <class Traits, class Schedule>
__device__ __forceinline__ void LoadTiles(const KernelArguments& args, const CUtensorMap* lhs_map,
                                          const Halves& rhs_maps, Schedule schedule, uint32_t rank,
                                          SharedMemory<Traits>* memory) {
  const bool leads = threadIdx.x % 32 == 0;
  RingPlace<Traits::kStages> place;
  Tile tile;
  while (schedule.Next(&tile)) {
    ForEachRange<Traits>(args, tile.expert, [&](int32_t start, int32_t size) {
#pragma unroll 1
      for (int32_t done = 0; done < size; done += kTileDepth, place.Advance()) {
        if (leads) {
          WaitBarrier(SharedAddress(&memory->empty[place.stage]), place.parity ^ 1);
          LoadStage<Traits>(lhs_map, rhs_maps, tile, start + done, rank,
                            SharedAddress(memory->stages[place.stage]),
                            SharedAddress(&memory->full[place.stage]));
        }
        __syncwarp();
      }
    });
  }
}

// Zeros in the lines of `pieces` pieces from `begin` on, for the products that follow in this
// warpgroup. Another warpgroup that shares a piece writes the same.
__device__ __forceinline__ void ClearLines(uint8_t* first_piece, int pieces, int begin) {
  for (int piece = 0; piece < pieces; ++piece) {
    auto* vectors = reinterpret_cast<uint4*>(first_piece + piece * kPieceBytes);
    constexpr int kVectors = 128 / sizeof(uint4);
    for (int i = begin * kVectors + threadIdx.x % 128; i < kPieceSide * kVectors; i += 128) {
      vectors[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Lets the cluster's loaders have the stage: one lane tells each block.
__device__ __forceinline__ void ReleaseStage(uint32_t empty) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < kClusterBlocks) ArriveAt(empty, lane);
}

// sums = this warpgroup's 64 rows of the tile.
template <class Traits>
__device__ __forceinline__ void MultiplyTile(const KernelArguments& args, const Tile& tile,
                                             int warpgroup, SharedMemory<Traits>* memory,
                                             RingPlace<Traits::kStages>* place,
                                             float (&sums)[kTileColumns / 2]) {
  constexpr int kSteps = kTileDepth / kStepDepth;
  uint32_t busy = 0;  // barrier of the stage that products may still read; 0: none
  if constexpr (Traits::kRagged) {
    // An expert may have no rows.
#pragma unroll
    for (int i = 0; i < kTileColumns / 2; ++i) sums[i] = 0;
  }
  ForEachRange<Traits>(args, tile.expert, [&](int32_t, int32_t size) {
#pragma unroll 1
    for (int32_t done = 0; done < size; done += kTileDepth, place->Advance()) {
      WaitBarrier(SharedAddress(&memory->full[place->stage]), place->parity);
      uint8_t* lhs = memory->stages[place->stage] + warpgroup * kPieceBytes;
      uint8_t* rhs = memory->stages[place->stage] + Traits::kLhsBytes;
      if constexpr (Traits::kRagged) {
        // Lines of other groups follow, or of nobody, with NaN in them. The products come whole:
        // code that takes some of them only is serialized by the compiler.
        if (size - done < kTileDepth) {
          ClearLines(lhs, 1, size - done);
          ClearLines(rhs, Traits::kRhsPieces, size - done);
          FenceSharedForCopies();
          SyncNamed(1 + warpgroup, 128);
        }
      }
      const uint64_t lhs_tile = DescribeOperand<Traits::kLhs>(SharedAddress(lhs));
      const uint64_t rhs_tile = DescribeOperand<Traits::kRhs>(SharedAddress(rhs));
      HoldSums(sums);
      FenceOperands();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Multiply<typename Traits::T, Traits::kLhs, Traits::kRhs>(
            sums, lhs_tile + step * StepOffset<Traits::kLhs>(),
            rhs_tile + step * StepOffset<Traits::kRhs>(), Traits::kRagged || busy != 0 || step > 0);
      }
      CommitProducts();
      if (busy != 0) {
        WaitProducts<1>();
        ReleaseStage(busy);
      }
      busy = SharedAddress(&memory->empty[place->stage]);
    }
  });
  WaitProducts<0>();
  HoldSums(sums);
  if (busy != 0) ReleaseStage(busy);
}

template <class Traits>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    GroupedGemmKernel(const __grid_constant__ CUtensorMap lhs_map,
                      const __grid_constant__ CUtensorMap rhs_map,
                      const __grid_constant__ CUtensorMap out_map,
                      const __grid_constant__ CUtensorMap up_map,
                      const __grid_constant__ KernelArguments args) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  if (LeftOut(args.wanted)) return;
  auto* memory = reinterpret_cast<SharedMemory<Traits>*>(dynamic);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const uint32_t rank = ClusterRank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      InitBarrier(SharedAddress(&memory->full[i]), 1);
      InitBarrier(SharedAddress(&memory->empty[i]), kClusterBlocks * kMultipliers * 4);
    }
    FenceBarrierInit();
    PrefetchMap(&lhs_map);
    PrefetchMap(&rhs_map);
    PrefetchMap(&out_map);
    PrefetchMap(&up_map);
  }
  if constexpr (Traits::kRagged) {
    OrderExperts(args.groups, reinterpret_cast<uint32_t*>(memory->stages[0]), memory->order);
    FenceSharedForCopies();
  }
  SyncCluster();
  const Cluster cluster{rank, blockIdx.x / kClusterBlocks, gridDim.x / kClusterBlocks};
  auto schedule = MakeSchedule<Traits>(args, memory->order, cluster);

  if (warpgroup == kMultipliers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoaderRegisters));
    if (threadIdx.x / 32 == 4 * kMultipliers) {
      LoadTiles<Traits>(args, &lhs_map, Halves{&rhs_map, &up_map, args.half}, schedule, rank,
                        memory);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplierRegisters));
    RingPlace<Traits::kStages> place;
    uint32_t turn = 0;
    Tile tile;
    while (schedule.Next(&tile)) {
      float sums[kTileColumns / 2];
      MultiplyTile<Traits>(args, tile, warpgroup, memory, &place, sums);
      StoreTile<Traits::kRagged, typename Traits::Out>(
          args.out, Halves{&out_map, &up_map, args.half}, tile, warpgroup,
          memory->staging[warpgroup], sums, &turn);
    }
    if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
  }
  // Neither block's memory goes while the other may load into it or arrive there.
  SyncCluster();
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_
