// One persistent kernel for the products of product.h.
//
// A block has one warpgroup that loads and two that multiply. Each of the two multiplies 64 rows of
// a 128-row output tile. Two blocks form a cluster, and load the operand that their tiles share
// only once. The multiplying warpgroups never wait for each other: while one stores its rows, the
// other uses the tensor cores.
//
// The loading warp runs ahead. Through shared memory the loading warp sends the multiplying
// warpgroups the rows to sum for each tile, because walking the schedule and finding a group's rows
// take as long as the products of some hundred rows. If several launches share the product, the
// loading warp draws tickets for tiles. Sums of 8-bit operands leave the tensor cores after every
// stage.
#ifndef EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_
#define EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/gemm/kernels/instances.h"
#include "cuda/gemm/kernels/promoted_sums.cuh"
#include "cuda/gemm/kernels/stages.cuh"
#include "cuda/gemm/tile/ring.cuh"
#include "cuda/gemm/tile/store_tile.cuh"
#include "cuda/gemm/tile/work_queue.cuh"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

// Registers of a loading and of a multiplying thread. A block's total stays as at launch. Finding
// work needs more than 40.
constexpr int kFinderRegisters = 56;
constexpr int kSummerRegisters = 224;
constexpr int kBlockBytes = 227 << 10;

template <GemmProduct product, typename LhsType, typename RhsType, typename Result, Summing summing,
          bool activates>
struct KernelTraits {
  using Lhs = LhsType;
  using Rhs = RhsType;
  using Out = Result;
  static constexpr Summing kSumming = summing;
  static constexpr bool kNarrow = sizeof(Lhs) == 1;
  static constexpr bool kTransposed = sizeof(Lhs) != 2;  // the contracted dim is contiguous
  static constexpr bool kRagged = product == GemmProduct::kWeightGrad;
  static constexpr bool kScaled =
      summing == Summing::kPromoted;  // sums are multiplied by scales at the end
  static constexpr bool kPromotes = summing != Summing::kWhole;
  static_assert(sizeof(Lhs) == sizeof(Rhs), "a stage has as many elements of both");
  static_assert(kNarrow == kPromotes, "sums of other operands are f32 anyway");
  static constexpr bool kByBlock = summing == Summing::kByBlock;
  static constexpr bool kActivates = activates;  // half of a tile's columns are the gate's
  static constexpr bool kByTile = summing == Summing::kByTile;
  static_assert(!kByTile || product == GemmProduct::kWeightGrad, "rows of others have scales");
  static constexpr Along kLhs = kRagged && !kTransposed ? Along::kOther : Along::kContracted;
  static constexpr Along kRhs =
      product == GemmProduct::kDataGrad || kTransposed ? Along::kContracted : Along::kOther;
  static constexpr int kDepth = 128 / sizeof(Lhs);  // contracted elements of a stage
  static constexpr int kLhsPieces = kTileRows / kPieceSide;
  static constexpr int kRhsPieces = kTileColumns / kPieceSide;
  static constexpr int kLhsBytes = kLhsPieces * kPieceBytes;
  static constexpr int kStageBytes = (kLhsPieces + kRhsPieces) * kPieceBytes;
  // Bytes of one warpgroup's rows of a tile.
  static constexpr int kHalfBytes = kStoredRows * kTileColumns * sizeof(Out);
  // Whether a warpgroup stages its whole tile. f32 tiles of 256 columns would leave no room for
  // stages. Other products gain more from a fourth stage: up to 18% if sums leave the tensor cores,
  // 3 to 4% with 16-bit operands.
  static constexpr bool kStagesWhole = summing == Summing::kByGroup && kHalfBytes <= 32 << 10;
  static constexpr int kStaged = kStagesWhole ? kHalfBytes : kStagingBytes;
  static constexpr int kOrder = kRagged ? kMaxExperts : 1;
  static constexpr int kScaleBytes =
      kByBlock ? sizeof(StageScales) : 0;  // bytes of a stage's scales
  // 512 bytes are for barriers and the queue.
  static constexpr int kStages =
      (kBlockBytes - kMultipliers * kStaged - kOrder * 2 - 512) / (kStageBytes + kScaleBytes);
};

template <class Traits>
struct SharedMemory {
  static constexpr int kStages = Traits::kStages;
  uint8_t stages[Traits::kStages][Traits::kStageBytes];
  uint8_t staging[kMultipliers][Traits::kStaged];
  StageScales scales[Traits::kByBlock ? Traits::kStages : 1];
  WorkQueue queue;
  uint64_t ticket;
  uint64_t full[Traits::kStages];
  uint64_t empty[Traits::kStages];
  uint16_t order[Traits::kOrder];
};

template <class Traits>
__device__ __forceinline__ auto MakeSchedule(const KernelArguments& args, const uint16_t* order,
                                             Cluster cluster) {
  constexpr int kStep = Traits::kActivates ? kGateColumns : kTileColumns;
  const int32_t columns = Traits::kActivates ? args.activation.width : args.out.columns;
  const int32_t column_tiles = (columns + kStep - 1) / kStep;
  if constexpr (Traits::kRagged) {
    return ExpertTileSchedule(order, args.groups.num_experts, args.out.rows, column_tiles,
                              args.band, cluster);
  } else {
    return RowTileSchedule(args.groups, column_tiles, kStep, args.band, cluster);
  }
}

// Calls body(group, rows, last) for each range that a tile sums over. Group -1 is an empty range.
template <class Traits, class Body>
__device__ __forceinline__ void ForEachWork(const KernelArguments& args, const Tile& tile,
                                            const Body& body) {
  if constexpr (Traits::kRagged) {
    const int stride = args.groups.num_experts;
    if (tile.expert >= args.groups.num_groups) body(-1, Rows{0, 0}, true);
    for (int group = tile.expert; group < args.groups.num_groups; group += stride) {
      const Rows rows = Traits::kTransposed ? FindPaddedRows(args.groups, group, Traits::kDepth)
                                            : FindRows(args.groups, group);
      body(group, rows, group + stride >= args.groups.num_groups);
    }
  } else {
    body(tile.group, Rows{0, args.depth}, true);
  }
}

// Runs in all lanes of the loading warp.
template <class Traits, class Schedule>
__device__ __forceinline__ void LoadTiles(const KernelArguments& args, const CUtensorMap* lhs_map,
                                          const Halves& rhs_maps, Schedule schedule, uint32_t rank,
                                          SharedMemory<Traits>* memory) {
  const bool leads = threadIdx.x % 32 == 0;
  const int32_t skipped = Traits::kActivates ? args.activation.width - kGateColumns : 0;
  RingPlace<Traits::kStages> place;
  RingPlace<kQueuedWork> next;
  Tile tile;
  uint32_t turn = 0;
  const auto find = [&] {
    if (args.tickets.words == nullptr) return schedule.Next(&tile);
    return schedule.At(DrawTicket(args.tickets, rank, ++turn, &memory->ticket), &tile);
  };
  while (find()) {
    ForEachWork<Traits>(args, tile, [&](int group, const Rows& rows, bool last) {
      PushWork(
          {tile.row, tile.column, tile.row_end, tile.expert, group, rows.size, last, rows.start},
          &next, &memory->queue);
#pragma unroll 1
      for (int32_t done = 0; done < rows.size; done += Traits::kDepth, place.Advance()) {
        if (leads) {
          WaitBarrier(SharedAddress(&memory->empty[place.stage]), place.parity ^ 1);
          LoadStage<Traits>(lhs_map, rhs_maps, tile, skipped, rows.start + done, rank,
                            SharedAddress(memory->stages[place.stage]),
                            SharedAddress(&memory->full[place.stage]));
        }
        __syncwarp();
      }
    });
  }
  PushWork({0, 0, 0, -1, -1, 0, 1, 0}, &next, &memory->queue);
  if (args.tickets.words != nullptr && rank == 0 && leads) EndTickets(args.tickets);
}

// sums (+)= the products of one stage. Without `add` the first products replace the sums.
template <class Traits>
__device__ __forceinline__ void MultiplyStage(const uint8_t* stage, int warpgroup, uint32_t add,
                                              float (&sums)[kTileColumns / 2]) {
  constexpr int kSteps = 128 / 32;  // bytes of a line / bytes of one instruction
  const uint64_t lhs =
      DescribeOperand<Traits::kLhs>(SharedAddress(stage + warpgroup * kPieceBytes));
  const uint64_t rhs = DescribeOperand<Traits::kRhs>(SharedAddress(stage + Traits::kLhsBytes));
  HoldSums(sums);
  FenceOperands();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t left = lhs + step * StepOffset<Traits::kLhs>();
    const uint64_t right = rhs + step * StepOffset<Traits::kRhs>();
    if constexpr (Traits::kTransposed) {
      Multiply32(sums, left, right, add || step > 0);
    } else {
      Multiply<typename Traits::Lhs, Traits::kLhs, Traits::kRhs>(sums, left, right,
                                                                 add || step > 0);
    }
  }
  CommitProducts();
}

// sums += the products of one range, added up by the tensor cores.
template <class Traits>
__device__ __forceinline__ void SumWhole(int32_t size, int warpgroup, SharedMemory<Traits>* memory,
                                         RingPlace<Traits::kStages>* place,
                                         float (&sums)[kTileColumns / 2]) {
  uint32_t busy = 0;  // barrier of the stage that products may still read; 0: none
#pragma unroll 1
  for (int32_t done = 0; done < size; done += Traits::kDepth, place->Advance()) {
    WaitBarrier(SharedAddress(&memory->full[place->stage]), place->parity);
    uint8_t* stage = memory->stages[place->stage];
    if constexpr (Traits::kRagged && !Traits::kTransposed) {
      if (size - done < Traits::kDepth) {
        ClearLines(stage + warpgroup * kPieceBytes, 1, size - done);
        ClearLines(stage + Traits::kLhsBytes, Traits::kRhsPieces, size - done);
        FenceSharedForCopies();
        SyncWarpgroup(warpgroup);
      }
    }
    MultiplyStage<Traits>(stage, warpgroup, Traits::kRagged || done > 0, sums);
    if (busy != 0) {
      WaitProducts<1>();
      ReleaseStage(busy);
    }
    busy = SharedAddress(&memory->empty[place->stage]);
  }
  WaitProducts<0>();
  HoldSums(sums);
  if (busy != 0) ReleaseStage(busy);
}

// Sums a tile, starting with the next work in the queue. Returns the tile's last work, or work with
// expert -1 at the end of the queue.
template <class Traits>
__device__ __forceinline__ Work SumTile(const KernelArguments& args, int warpgroup,
                                        SharedMemory<Traits>* memory,
                                        RingPlace<Traits::kStages>* place,
                                        RingPlace<kQueuedWork>* next,
                                        float (&sums)[kTileColumns / 2]) {
  Work work;
  float scales[2] = {1, 1};
#pragma unroll
  for (int i = 0; i < kTileColumns / 2; ++i) sums[i] = 0;
  do {
    work = TakeWork(next, &memory->queue);
    if (work.expert < 0) return work;
    if constexpr (Traits::kScaled) {
      if (work.group >= 0) {
        scales[0] = LoadEarly(args.scales.lhs + work.group);
        scales[1] = LoadEarly(args.scales.rhs + (Traits::kRagged ? work.group : work.expert));
      }
    }
    if constexpr (Traits::kPromotes) {
      SumPromoted<Traits>(args, work, warpgroup, memory, place, sums);
    } else {
      SumWhole<Traits>(work.size, warpgroup, memory, place, sums);
    }
  } while (work.last == 0);
  if constexpr (Traits::kScaled) {
#pragma unroll
    for (int i = 0; i < kTileColumns / 2; ++i) sums[i] = sums[i] * scales[0] * scales[1];
  }
  return work;
}

template <class Traits>
__device__ __forceinline__ void MultiplyTiles(const KernelArguments& args, const Halves& out_maps,
                                              const CUtensorMap* inner_map, int warpgroup,
                                              SharedMemory<Traits>* memory) {
  RingPlace<Traits::kStages> place;
  RingPlace<kQueuedWork> next;
  uint32_t turn = 0;
  while (true) {
    float sums[kTileColumns / 2];
    const Work work = SumTile<Traits>(args, warpgroup, memory, &place, &next, sums);
    if (work.expert < 0) break;
    // Nobody reads the gradient of a slot without rows.
    if (Traits::kRagged && work.size == 0 && work.expert >= args.first_slot) continue;
    const Tile tile{work.expert, work.group, work.row, work.column, work.row_end, false};
    if constexpr (Traits::kActivates) {
      StoreActivated<typename Traits::Out, Traits::kNarrow>(
          args.out, args.activation, out_maps.first, inner_map, tile, warpgroup,
          memory->staging[warpgroup], sums, &turn);
    } else if constexpr (Traits::kStagesWhole) {
      StoreWholeTile<typename Traits::Out>(args.out, out_maps, tile, warpgroup,
                                           memory->staging[warpgroup], sums);
    } else {
      StoreTile<Traits::kRagged, typename Traits::Out>(args.out, out_maps, tile, warpgroup,
                                                       memory->staging[warpgroup], sums, &turn);
    }
  }
  if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
}

template <class Traits>
__device__ __forceinline__ void InitBarriers(SharedMemory<Traits>* memory) {
  for (int i = 0; i < Traits::kStages; ++i) {
    InitBarrier(SharedAddress(&memory->full[i]), Traits::kByBlock ? 1 + kScaleWarps : 1);
    InitBarrier(SharedAddress(&memory->empty[i]), kClusterBlocks * kMultipliers * 4);
  }
  memory->ticket = 0;
  InitQueue(&memory->queue, kMultipliers * 4 + (Traits::kByBlock ? kScaleWarps : 0));
  FenceBarrierInit();
}

template <class Traits>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    GroupedGemmKernel(const __grid_constant__ CUtensorMap lhs_map,
                      const __grid_constant__ CUtensorMap rhs_map,
                      const __grid_constant__ CUtensorMap out_map,
                      const __grid_constant__ CUtensorMap up_map,
                      const __grid_constant__ CUtensorMap slots_map,
                      const __grid_constant__ CUtensorMap up_slots_map,
                      const __grid_constant__ CUtensorMap inner_map,
                      const __grid_constant__ KernelArguments args) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  if (LeftOut(args.wanted)) return;
  const auto with = [&](const CUtensorMap* first) {
    return Halves{first, &up_map, &slots_map, &up_slots_map, args.half, args.first_slot};
  };
  auto* memory = reinterpret_cast<SharedMemory<Traits>*>(dynamic);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const uint32_t rank = ClusterRank();
  if (threadIdx.x == 0) {
    InitBarriers<Traits>(memory);
    PrefetchMap(&lhs_map);
    PrefetchMap(&rhs_map);
    PrefetchMap(&out_map);
    PrefetchMap(&up_map);
    if constexpr (Traits::kActivates) PrefetchMap(&inner_map);
  }
  if constexpr (Traits::kRagged) {
    OrderExperts(args.groups, reinterpret_cast<uint32_t*>(memory->stages[0]), memory->order);
    FenceSharedForCopies();
  }
  SyncCluster();
  if (warpgroup == kMultipliers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFinderRegisters));
    if (threadIdx.x / 32 == 4 * kMultipliers) {
      const Cluster cluster{rank, blockIdx.x / kClusterBlocks, gridDim.x / kClusterBlocks};
      LoadTiles<Traits>(args, &lhs_map, with(&rhs_map),
                        MakeSchedule<Traits>(args, memory->order, cluster), rank, memory);
    }
    if constexpr (Traits::kByBlock) {
      const int warp = threadIdx.x / 32 - 4 * kMultipliers - 1;
      if (warp >= 0 && warp < kScaleWarps) LoadScales(args.scales, warp, memory);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kSummerRegisters));
    MultiplyTiles<Traits>(args, with(&out_map), &inner_map, warpgroup, memory);
  }
  // Neither block may free its memory while the other can load into it or arrive at its barriers.
  SyncCluster();
}

template <class Traits>
cudaError_t Launch(cudaStream_t stream, const Maps& maps, const KernelArguments& args, int blocks) {
  constexpr int kBytes = sizeof(SharedMemory<Traits>);
  static_assert(kBytes <= kBlockBytes, "a block has 227 KiB");
  static_assert(Traits::kStages >= 3, "loads must be ahead");
  const cudaError_t error = AllowSharedBytes(GroupedGemmKernel<Traits>, kBytes);
  if (error != cudaSuccess) return error;
  GroupedGemmKernel<Traits><<<blocks, kThreads, kBytes, stream>>>(
      maps.lhs, maps.rhs, maps.out, maps.up, maps.slots, maps.up_slots, maps.inner, args);
  return cudaGetLastError();
}

template <GemmProduct product, FloatType lhs, FloatType rhs, FloatType out, Summing summing,
          bool activates>
constexpr Instance MakeInstance() {
  using Traits =
      KernelTraits<product, Element<lhs>, Element<rhs>, Element<out>, summing, activates>;
  return {product, lhs, rhs, out, summing, activates, &Launch<Traits>};
}

#define EP_MAKE_INSTANCE(product, lhs, rhs, out, summing)                            \
  MakeInstance<GemmProduct::product, FloatType::lhs, FloatType::rhs, FloatType::out, \
               Summing::summing, false>(),
#define EP_MAKE_ACTIVATED(product, lhs, rhs, out, summing)                           \
  MakeInstance<GemmProduct::product, FloatType::lhs, FloatType::rhs, FloatType::out, \
               Summing::summing, true>(),

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_KERNELS_GROUPED_GEMM_KERNEL_CUH_
