// What multiprocessors store of rows that go to several places each, as dispatch places them: the
// bound of an exchange on few of them. By bulk copies from shared memory, and by 16 bytes a lane.
//   stores_main
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/bulk_copy.cuh"
#include "device_world.h"

namespace gpu_test {
namespace {

namespace ec = ep_runtime::cuda;

constexpr int kRows = 4096, kPlaces = 4;  // rows, and copies of each
constexpr int kRowBytes = 14336, kPieceBytes = kRowBytes / 2;
constexpr int kWarps = 8, kBuffers = 2, kRepeats = 4;

struct Arrays {
  const uint8_t* from;  // [kRows, kRowBytes]
  uint8_t* to;          // [kRows * kPlaces, kRowBytes]
  const int* places;    // [kRows, kPlaces]

  __device__ uint8_t* Piece(int row, int copy, int piece) const {
    return to + int64_t{places[row * kPlaces + copy]} * kRowBytes + piece * kPieceBytes;
  }
};

// A warp takes every so many rows, piece by piece; the next piece is loaded while one is stored.
__global__ void StoreBulk(Arrays arrays) {
  extern __shared__ __align__(128) uint8_t pieces[];
  __shared__ ec::LoadBarrier barriers[kWarps * kBuffers];
  const int warp = threadIdx.x / 32, first = blockIdx.x * kWarps + warp, step = gridDim.x * kWarps;
  if (threadIdx.x % 32 != 0 || first >= kRows) return;
  uint8_t* mine = pieces + warp * kBuffers * kPieceBytes;
  ec::LoadBarrier* barrier = barriers + warp * kBuffers;
  for (int i = 0; i < kBuffers; ++i) barrier[i].Init();
  ec::FenceBarrierInit();
  const int total = ((kRows - first + step - 1) / step) * 2;
  const auto load = [&](int q) {
    const int64_t row = first + q / 2 * step;
    barrier[q % kBuffers].Load(mine + q % kBuffers * kPieceBytes,
                               arrays.from + row * kRowBytes + q % 2 * kPieceBytes, kPieceBytes);
  };
  load(0);
  for (int q = 0; q < total; ++q) {
    if (q + 1 < total) {
      ec::WaitStoresRead<kBuffers - 2>();
      load(q + 1);
    }
    barrier[q % kBuffers].Wait(q / kBuffers & 1);
    for (int copy = 0; copy < kPlaces; ++copy) {
      ec::BulkStore(arrays.Piece(first + q / 2 * step, copy, q % 2),
                    mine + q % kBuffers * kPieceBytes, kPieceBytes);
    }
    ec::CommitStores();
  }
  ec::WaitStores<0>();
}

__global__ void StoreVectors(Arrays arrays) {
  constexpr int kAtOnce = 7;  // loads of a lane that are on their way together
  constexpr int kVectors = kPieceBytes / 16;
  static_assert(kVectors % (32 * kAtOnce) == 0, "a piece is whole rounds");
  const int lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32;
  for (int row = warp; row < kRows; row += gridDim.x * kWarps) {
    for (int piece = 0; piece < 2; ++piece) {
      const auto* from = reinterpret_cast<const uint4*>(arrays.from + int64_t{row} * kRowBytes +
                                                        piece * kPieceBytes);
      for (int i = lane; i < kVectors; i += 32 * kAtOnce) {
        uint4 values[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) values[j] = __ldg(from + i + 32 * j);
        for (int copy = 0; copy < kPlaces; ++copy) {
          auto* to = reinterpret_cast<uint4*>(arrays.Piece(row, copy, piece));
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) to[i + 32 * j] = values[j];
        }
      }
    }
  }
}

template <typename T>
T* Allocated(int64_t count) {
  T* made = nullptr;
  CHECK_CUDA(cudaMalloc(&made, count * sizeof(T)));
  return made;
}

// The least of some runs.
double MsOf(void (*kernel)(Arrays), int blocks, int shared_bytes, const Arrays& arrays) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  float least = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    CHECK_CUDA(cudaEventRecord(begin));
    kernel<<<blocks, kWarps * 32, shared_bytes>>>(arrays);
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    least = std::min(least, ms);
  }
  return least;
}

}  // namespace

int Main() {
  std::vector<int> places(kRows * kPlaces);
  for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int>(i);
  std::shuffle(places.begin(), places.end(), std::mt19937(1));
  auto* from = Allocated<uint8_t>(int64_t{kRows} * kRowBytes);
  auto* to = Allocated<uint8_t>(int64_t{kRows} * kPlaces * kRowBytes);
  auto* where = Allocated<int>(places.size());
  CHECK_CUDA(cudaMemcpy(where, places.data(), places.size() * sizeof(int), cudaMemcpyDefault));
  const Arrays arrays{from, to, where};
  const int shared_bytes = kWarps * kBuffers * kPieceBytes;
  CHECK_CUDA(
      cudaFuncSetAttribute(StoreBulk, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  std::printf("blocks  GB/s by bulk copies, of one  GB/s by vectors, of one\n");
  for (int blocks : {1, 8, 16, 20, 24, 32, 40, 64, 132}) {
    const double gigabytes = 1e-9 * kRows * kPlaces * kRowBytes;
    const double bulk = gigabytes / MsOf(StoreBulk, blocks, shared_bytes, arrays) * 1e3;
    const double vectors = gigabytes / MsOf(StoreVectors, blocks, 0, arrays) * 1e3;
    std::printf("%6d  %19.0f %7.1f  %15.0f %7.1f\n", blocks, bulk, bulk / blocks, vectors,
                vectors / blocks);
  }
  return 0;
}

}  // namespace gpu_test

int main() { return gpu_test::Main(); }
