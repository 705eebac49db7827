// The ranks of one EP group in one process: a window per rank, mapped at base + rank * stride for
// every GPU, and the state that the runtime sets up around the kernels. Ranks may share a GPU.
#ifndef EP_RUNTIME_TESTS_GPU_DEVICE_WORLD_H_
#define EP_RUNTIME_TESTS_GPU_DEVICE_WORLD_H_

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/memory/tally.h"
#include "cuda/device/device_group.h"
#include "memory.h"

namespace gpu_test {

using ep_runtime::GroupSizes;
using ep_runtime::cuda::DeviceGroup;
using ep_runtime::cuda::FailRecord;
using ep_runtime::cuda::FlagLayout;

#define CHECK_DRIVER(expr)                                                    \
  do {                                                                        \
    const CUresult error_ = (expr);                                           \
    if (error_ != CUDA_SUCCESS) {                                             \
      std::printf("%s:%d %s: error %d\n", __FILE__, __LINE__, #expr, error_); \
      std::fflush(stdout);                                                    \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)

// A driver function by name, because the build machine has no driver library to link.
template <typename Function>
Function* Driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  return reinterpret_cast<Function*>(entry);
}
#define DRIVER(name) Driver<decltype(::name)>(#name)

class World {
 public:
  World(const GroupSizes& sizes, int gpus, uint64_t budget_ns = 20'000'000'000ull)
      : sizes_(sizes), ranks_(static_cast<int>(sizes.ep_size)), gpus_(gpus) {
    MapWindows();
    CHECK_CUDA(cudaHostAlloc(&poison_, 64, cudaHostAllocPortable));
    CHECK_CUDA(cudaHostAlloc(&records_, ranks_ * sizeof(FailRecord), cudaHostAllocPortable));
    *poison_ = 0;
    std::memset(records_, 0, ranks_ * sizeof(FailRecord));
    boards_.resize(ranks_);
    groups_.resize(ranks_);
    scratch_.resize(ranks_);
    streams_.resize(ranks_);
    for (int rank = 0; rank < ranks_; ++rank) {
      Use(rank);
      CHECK_CUDA(cudaStreamCreateWithFlags(&streams_[rank], cudaStreamNonBlocking));
      CHECK_CUDA(cudaMalloc(&scratch_[rank], ep_runtime::cuda::ScratchBytes(sizes)));
      CHECK_CUDA(cudaMalloc(&groups_[rank], sizeof(DeviceGroup)));
      AllocateBoard(rank);
    }
    Form(1, budget_ns);
  }

  ~World() {
    for (int rank = 0; rank < ranks_; ++rank) {
      Use(rank);
      cudaDeviceSynchronize();
      cudaStreamDestroy(streams_[rank]);
      cudaFree(scratch_[rank]);
      cudaFree(groups_[rank]);
      cudaFreeHost(boards_[rank].host);
      cudaFree(boards_[rank].device);
    }
    cudaFreeHost(poison_);
    cudaFreeHost(records_);
    for (int rank = 0; rank < ranks_; ++rank) {
      DRIVER(cuMemUnmap)(base_ + rank * stride_, stride_);
      DRIVER(cuMemRelease)(memory_[rank]);
    }
    DRIVER(cuMemAddressFree)(base_, ranks_ * stride_);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Starts a new generation: zeroes flags, poisons staging, and restarts epochs.
  void Form(uint64_t generation, uint64_t budget_ns) {
    Synchronize();
    std::memset(records_, 0, ranks_ * sizeof(FailRecord));
    for (int rank = 0; rank < ranks_; ++rank) {
      Use(rank);
      auto* window = reinterpret_cast<uint8_t*>(base_ + rank * stride_);
      const int64_t lanes_bytes = ep_runtime::WindowBytes(sizes_);
      CHECK_CUDA(cudaMemset(window, 0xFF, lanes_bytes));
      CHECK_CUDA(
          cudaMemset(window + lanes_bytes, 0, FlagLayout(sizes_).window_bytes - lanes_bytes));
      DeviceGroup group{};
      ep_runtime::cuda::SetSizes(sizes_, 0, rank, &group);
      group.generation = generation;
      group.windows = reinterpret_cast<uint8_t*>(base_);
      group.window_stride = static_cast<int64_t>(stride_);
      group.budget_ns = budget_ns;
      group.poison_generation = poison_;
      group.record = records_ + rank;
      group.progress = ProgressOf(rank);
      group.scratch = scratch_[rank];
      group.open = 1;
      CHECK_CUDA(cudaMemcpy(groups_[rank], &group, sizeof(group), cudaMemcpyHostToDevice));
    }
    Synchronize();
  }

  // Makes the next call's epoch `epoch` + 1. Flags do not change.
  void SetEpoch(uint64_t epoch) {
    Synchronize();
    for (int rank = 0; rank < ranks_; ++rank) {
      Use(rank);
      CHECK_CUDA(cudaMemcpy(&groups_[rank]->epoch, &epoch, 8, cudaMemcpyHostToDevice));
    }
  }

  void Close() {
    const uint32_t closed = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      Use(rank);
      CHECK_CUDA(cudaMemcpy(&groups_[rank]->open, &closed, 4, cudaMemcpyHostToDevice));
    }
  }

  void Use(int rank) const { CHECK_CUDA(cudaSetDevice(rank % gpus_)); }
  void Synchronize() const {
    for (int gpu = 0; gpu < gpus_; ++gpu) {
      CHECK_CUDA(cudaSetDevice(gpu));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }

  int ranks() const { return ranks_; }
  int gpus() const { return gpus_; }
  const GroupSizes& sizes() const { return sizes_; }
  DeviceGroup* group(int rank) const { return groups_[rank]; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  volatile uint64_t* poison() const { return poison_; }
  const FailRecord& record(int rank) const { return records_[rank]; }
  uint8_t* window(int rank) const { return reinterpret_cast<uint8_t*>(base_ + rank * stride_); }

 private:
  // A rank's board: one of each record, in host memory, and on the device the sums for them.
  struct Board {
    uint8_t* host;
    uint8_t* device;
  };
  static constexpr int64_t kHandleBytes =
      ep_runtime::kMaxHandles * static_cast<int64_t>(sizeof(ep_runtime::HandleRecord));
  static constexpr int64_t kRowsBytes =
      ep_runtime::kMaxHandles * static_cast<int64_t>(sizeof(ep_runtime::DeviceRows));
  static constexpr int64_t kTotalsBytes =
      ep_runtime::kMaxHandles * static_cast<int64_t>(sizeof(ep_runtime::cuda::HandleTotals));

  void AllocateBoard(int rank) {
    const int64_t tally = ep_runtime::TallyLayout(sizes_).tally_bytes;
    const int64_t host = ep_runtime::kPageBytes + kHandleBytes + kRowsBytes + tally;
    CHECK_CUDA(cudaHostAlloc(&boards_[rank].host, host, cudaHostAllocPortable));
    CHECK_CUDA(cudaMalloc(&boards_[rank].device, kTotalsBytes + tally));
    std::memset(boards_[rank].host, 0, host);
    CHECK_CUDA(cudaMemset(boards_[rank].device, 0, kTotalsBytes + tally));
  }
  ep_runtime::cuda::Progress ProgressOf(int rank) const {
    const ep_runtime::TallyLayout layout(sizes_);
    const Board& board = boards_[rank];
    ep_runtime::cuda::Progress progress{};
    progress.now_ns = reinterpret_cast<uint64_t*>(board.host);
    progress.rank = board.host + sizeof(ep_runtime::RankRecord);
    progress.handles = board.host + ep_runtime::kPageBytes;
    progress.device_rows = board.host + ep_runtime::kPageBytes + kHandleBytes;
    progress.totals = reinterpret_cast<ep_runtime::cuda::HandleTotals*>(board.device);
    progress.counts_calls = rank == 0;
    progress.tally.sums = board.device + kTotalsBytes;
    progress.tally.board = board.host + ep_runtime::kPageBytes + kHandleBytes + kRowsBytes;
    progress.tally.peers_offset = layout.peers_offset;
    progress.tally.loads_offset = layout.loads_offset;
    progress.tally.load_bytes = layout.load_bytes;
    progress.tally.experts = sizes_.experts_per_rank();
    return progress;
  }
  void MapWindows() {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t granularity = 0;
    CHECK_DRIVER(DRIVER(cuMemGetAllocationGranularity)(&granularity, &prop,
                                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    const size_t bytes = FlagLayout(sizes_).window_bytes;
    stride_ = (bytes + granularity - 1) / granularity * granularity;
    CHECK_DRIVER(DRIVER(cuMemAddressReserve)(&base_, ranks_ * stride_, 0, 0, 0));
    memory_.resize(ranks_);
    std::vector<CUmemAccessDesc> access(gpus_);
    for (int gpu = 0; gpu < gpus_; ++gpu) {
      access[gpu].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access[gpu].location.id = gpu;
      access[gpu].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      prop.location.id = rank % gpus_;
      CUmemGenericAllocationHandle made;
      CHECK_DRIVER(DRIVER(cuMemCreate)(&made, stride_, &prop, 0));
      int fd = -1;
      CHECK_DRIVER(DRIVER(cuMemExportToShareableHandle)(
          &fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
      CHECK_DRIVER(DRIVER(cuMemImportFromShareableHandle)(
          &memory_[rank], reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
      close(fd);
      CHECK_DRIVER(DRIVER(cuMemMap)(base_ + rank * stride_, stride_, 0, memory_[rank], 0));
      CHECK_DRIVER(DRIVER(cuMemRelease)(made));
    }
    CHECK_DRIVER(DRIVER(cuMemSetAccess)(base_, ranks_ * stride_, access.data(), gpus_));
  }

  GroupSizes sizes_;
  int ranks_;
  int gpus_;
  CUdeviceptr base_ = 0;
  size_t stride_ = 0;
  std::vector<CUmemGenericAllocationHandle> memory_;
  uint64_t* poison_ = nullptr;
  FailRecord* records_ = nullptr;
  std::vector<Board> boards_;
  std::vector<DeviceGroup*> groups_;
  std::vector<int32_t*> scratch_;
  std::vector<cudaStream_t> streams_;
};

// Calls `main` with what to do and the number of ranks, of the command line, and of GPUs.
inline int Run(int (*main)(const std::string&, int, int), int argc, char** argv) {
  // Load modules now, because a lazy load waits for kernels that wait for peers.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  // Each rank has a stream, and none may wait behind another's.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  int gpus = 0;
  CHECK_CUDA(cudaGetDeviceCount(&gpus));
  const int ranks = argc > 2 ? std::atoi(argv[2]) : gpus;
  return main(argc > 1 ? argv[1] : "check", ranks, std::min(ranks, gpus));
}

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_DEVICE_WORLD_H_
