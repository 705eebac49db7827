// rows x weights of tf32, without a transposed copy of the weights.
//
// What lies in shared memory must have the contracted dim along memory; registers need not. So a
// tile is computed the other way round: weights times rows, the weights' part of it in registers,
// which each thread picks from shared memory. The tile's queue, loads and order are those of
// queued_gemm_kernel.cuh.
#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"
#include "cuda/gemm/kernels/instances.h"
#include "cuda/gemm/tile/picked_tile.h"
#include "cuda/gemm/tile/work_queue.cuh"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr int kFinderRegisters = 56;
constexpr int kSummerRegisters = 224;
constexpr int kDepth = 32;       // contracted elements of a stage
constexpr int kParts = 2;        // of a stage, whose weights a thread holds at a time
constexpr int kPartSteps = 2;    // instructions' depths of a part
constexpr int kBoxColumns = 32;  // of weights: lines of 128 bytes
constexpr int kBoxBytes = kDepth * 128;
static_assert(kDepth == kPickedLines, "a box is as deep as a stage");
constexpr int kBoxes = kTileColumns / kBoxColumns;
constexpr int kRowPieces = kTileRows / kPieceSide;
constexpr int kRowBytes = kRowPieces * kPieceBytes;
constexpr int kStageBytes = kRowBytes + kBoxes * kBoxBytes;
constexpr int kStages = 4;
constexpr int kHalves = 2;  // of a warpgroup's columns: 64 each, an instruction's lines

struct Traits {
  static constexpr bool kRagged = false;
};

struct Memory {
  uint8_t stages[kStages][kStageBytes];
  uint8_t staging[kMultipliers][kStagingBytes];
  WorkQueue queue;
  uint64_t full[kStages];
  uint64_t empty[kStages];
};
static_assert(sizeof(Memory) <= 227 << 10, "a block has 227 KiB");

// What this thread picks.
struct Picks {
  int box;
  int columns[2];
  int depth;

  __device__ Picks() {
    const int thread = threadIdx.x % 128;
    box = PickedBox(thread);
    columns[0] = PickedColumn(thread, 0);
    columns[1] = PickedColumn(thread, 1);
    depth = PickedDepth(thread, 0);
  }
};

__device__ __forceinline__ void LoadStage(const CUtensorMap* lhs_map, const Halves& rhs_maps,
                                          const Tile& tile, int32_t depth, uint32_t rank,
                                          uint32_t stage, uint32_t full) {
  constexpr uint16_t kBoth = 3;
  ExpectBytes(full, kStageBytes);
#pragma unroll
  for (int piece = 0; piece < kRowPieces; ++piece) {
    const Coordinates at{depth, tile.row + piece * kPieceSide, 0};
    const uint32_t to = stage + piece * kPieceBytes;
    if (!tile.share_rows) {
      LoadBox(lhs_map, at, to, full);
    } else if (piece / (kRowPieces / kClusterBlocks) == rank) {
      LoadBoxInto(kBoth, lhs_map, at, to, full);
    }
  }
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    Coordinates at{tile.column + box * kBoxColumns, depth, tile.expert};
    const CUtensorMap* rhs_map = FindHalf(rhs_maps, &at.x);
    const uint32_t to = stage + kRowBytes + box * kBoxBytes;
    if (tile.share_rows) {
      LoadBox(rhs_map, at, to, full);
    } else if (box / (kBoxes / kClusterBlocks) == rank) {
      LoadBoxInto(kBoth, rhs_map, at, to, full);
    }
  }
}

// The loading warp, all its lanes.
__device__ __forceinline__ void LoadTiles(const KernelArguments& args, const CUtensorMap* lhs_map,
                                          const Halves& rhs_maps, Cluster cluster, Memory* memory) {
  const bool leads = threadIdx.x % 32 == 0;
  auto schedule = MakeSchedule<Traits>(args, nullptr, cluster);
  RingPlace<kStages> place;
  RingPlace<kQueuedWork> next;
  Tile tile;
  while (schedule.Next(&tile)) {
    PushWork({tile.row, tile.column, tile.row_end, tile.expert, tile.group, args.depth, 1}, &next,
             &memory->queue);
#pragma unroll 1
    for (int32_t done = 0; done < args.depth; done += kDepth, place.Advance()) {
      if (leads) {
        WaitBarrier(SharedAddress(&memory->empty[place.stage]), place.parity ^ 1);
        LoadStage(lhs_map, rhs_maps, tile, done, cluster.rank,
                  SharedAddress(memory->stages[place.stage]),
                  SharedAddress(&memory->full[place.stage]));
      }
      __syncwarp();
    }
  }
  PushWork({0, 0, 0, -1, -1, 0, 1}, &next, &memory->queue);
}

using Part = uint32_t[kHalves][kPartSteps][4];

// `weights`: the warpgroup's first box in a stage. `offsets` are of an instruction's four values.
__device__ __forceinline__ void PickWeights(uint32_t weights, const uint32_t (&offsets)[4],
                                            int part, Part& picked) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t from =
            weights + offsets[i] + half * 2 * kBoxBytes + (part * kPartSteps + step) * 8 * 128;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(picked[half][step][i]) : "r"(from));
      }
    }
  }
}

__device__ __forceinline__ void HoldPart(Part& picked) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(picked[half][step][i])::"memory");
    }
  }
}

__device__ __forceinline__ void MultiplyPart(uint32_t rows, int part, const Part& picked,
                                             float (&sums)[kHalves][64]) {
  const uint64_t operand = DescribeOperand<Along::kContracted>(rows);
  HoldSums(sums[0]);
  HoldSums(sums[1]);
  FenceOperands();
#pragma unroll
  for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      MultiplyPicked(sums[half], picked[half][step],
                     operand + (part * kPartSteps + step) * StepOffset<Along::kContracted>());
    }
  }
  CommitProducts();
}

// sums[half][4 * j + 2 * which + e]: column `which` of the half, row 8 * j + 2 * (lane % 4) + e.
__device__ __forceinline__ void SumTile(int32_t size, int warpgroup, const Picks& lane,
                                        Memory* memory, RingPlace<kStages>* place,
                                        float (&sums)[kHalves][64]) {
  uint32_t offsets[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    offsets[i] = lane.box * kBoxBytes +
                 SwizzledOffset(PickedDepth(lane.depth, i), lane.columns[PickedWhich(i)]);
  }
  Part parts[kParts];
  uint32_t busy = 0;  // barrier of the stage that products may still read; 0: none
#pragma unroll 1
  for (int32_t done = 0; done < size; done += kDepth, place->Advance()) {
    WaitBarrier(SharedAddress(&memory->full[place->stage]), place->parity);
    const uint32_t stage = SharedAddress(memory->stages[place->stage]);
    const uint32_t weights = stage + kRowBytes + warpgroup * (kBoxes / kMultipliers) * kBoxBytes;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      PickWeights(weights, offsets, part, parts[part]);
      MultiplyPart(stage, part, parts[part], sums);
      WaitProducts<1>();
      HoldPart(parts[1 - part]);
      if (part == 0 && busy != 0) ReleaseStage(busy);
    }
    busy = SharedAddress(&memory->empty[place->stage]);
  }
  WaitProducts<0>();
  HoldSums(sums[0]);
  HoldSums(sums[1]);
  if (busy != 0) ReleaseStage(busy);
}

__device__ __forceinline__ float LoadBias(const OutShape& out, int32_t expert, int32_t column) {
  if (out.bias == nullptr || column >= out.columns) return 0;
  const int64_t at = static_cast<int64_t>(expert) * out.columns + column;
  if (out.bias_type == FloatType::kBF16) return static_cast<const __nv_bfloat16*>(out.bias)[at];
  if (out.bias_type == FloatType::kF16) return static_cast<const __half*>(out.bias)[at];
  return static_cast<const float*>(out.bias)[at];
}

// 64 rows of one half's columns to two chunks of staging, one a box.
__device__ __forceinline__ void WriteRows(uint32_t staging, const Picks& lane, const float* sums,
                                          const float (&bias)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int which = i / 2 % 2;
    const int row = i / 4 * 8 + 2 * lane.depth + i % 2;
    const uint32_t to = staging + lane.box * kChunkBytes + SwizzledOffset(row, lane.columns[which]);
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(sums[i] + bias[which]) : "memory");
  }
}

// The copies may still read `staging` when it returns.
__device__ __forceinline__ void StoreSums(const OutShape& out, const CUtensorMap* map,
                                          const Work& work, int warpgroup, const Picks& lane,
                                          uint8_t* staging, const float (&sums)[kHalves][64]) {
  const bool leads = threadIdx.x % 128 == 0;
  const uint32_t to = SharedAddress(staging);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int32_t column = work.column + warpgroup * (kTileColumns / kMultipliers) + half * 64;
    const int32_t mine = column + lane.box * kBoxColumns;
    const float bias[2] = {LoadBias(out, work.expert, mine + lane.columns[0]),
                           LoadBias(out, work.expert, mine + lane.columns[1])};
#pragma unroll
    for (int part = 0; part < kTileRows / kStoredRows; ++part) {
      const int32_t row = work.row + part * kStoredRows;
      const int32_t rows = work.row_end - row;
      if (rows <= 0 || column >= out.columns) continue;
      if (leads) WaitStoresRead<0>();
      SyncNamed(1 + warpgroup, 128);
      WriteRows(to, lane, sums[half] + part * 32, bias);
      FenceSharedForCopies();
      SyncNamed(1 + warpgroup, 128);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const int32_t first = column + box * kBoxColumns;
        if (first >= out.columns) continue;
        const uint32_t chunk = to + box * kChunkBytes;
        if (rows < kStoredRows) CopyChunk<float>(out, chunk, row, rows, first);
        if (rows >= kStoredRows && leads) StoreBox(map, {first, row, 0}, chunk);
      }
      if (leads) CommitStores();
    }
  }
}

__device__ __forceinline__ void MultiplyTiles(const KernelArguments& args,
                                              const CUtensorMap* out_map, int warpgroup,
                                              Memory* memory) {
  const Picks lane;
  RingPlace<kStages> place;
  RingPlace<kQueuedWork> next;
  while (true) {
    const Work work = TakeWork(&next, &memory->queue);
    if (work.expert < 0) break;
    float sums[kHalves][64];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[half][i] = 0;
    }
    SumTile(work.size, warpgroup, lane, memory, &place, sums);
    StoreSums(args.out, out_map, work, warpgroup, lane, memory->staging[warpgroup], sums);
  }
  if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
}

__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    ForwardKernel(const __grid_constant__ CUtensorMap lhs_map,
                  const __grid_constant__ CUtensorMap rhs_map,
                  const __grid_constant__ CUtensorMap out_map,
                  const __grid_constant__ CUtensorMap up_map,
                  const __grid_constant__ KernelArguments args) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  if (LeftOut(args.wanted)) return;
  auto* memory = reinterpret_cast<Memory*>(dynamic);
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(SharedAddress(&memory->full[i]), 1);
      InitBarrier(SharedAddress(&memory->empty[i]), kClusterBlocks * kMultipliers * 4);
    }
    InitQueue(&memory->queue, kMultipliers * 4);
    FenceBarrierInit();
    PrefetchMap(&lhs_map);
    PrefetchMap(&rhs_map);
    PrefetchMap(&out_map);
    PrefetchMap(&up_map);
  }
  SyncCluster();
  if (warpgroup == kMultipliers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFinderRegisters));
    if (threadIdx.x / 32 == 4 * kMultipliers) {
      const Cluster cluster{ClusterRank(), blockIdx.x / kClusterBlocks, gridDim.x / kClusterBlocks};
      LoadTiles(args, &lhs_map, Halves{&rhs_map, &up_map, args.half}, cluster, memory);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kSummerRegisters));
    MultiplyTiles(args, &out_map, warpgroup, memory);
  }
  // Neither block's memory goes while the other may load into it or arrive there.
  SyncCluster();
}

cudaError_t Launch(cudaStream_t stream, const Maps& maps, const KernelArguments& args, int blocks) {
  constexpr int kBytes = sizeof(Memory);
  const cudaError_t error = AllowSharedBytes(ForwardKernel, kBytes);
  if (error != cudaSuccess) return error;
  ForwardKernel<<<blocks, kThreads, kBytes, stream>>>(maps.lhs, maps.rhs, maps.out, maps.up, args);
  return cudaGetLastError();
}

constexpr Instance kInstances[] = {{GemmProduct::kForward, FloatType::kTF32, FloatType::kTF32,
                                    FloatType::kF32, true, Summing::kWhole, &Launch}};

}  // namespace

Instances Forward32Instances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
