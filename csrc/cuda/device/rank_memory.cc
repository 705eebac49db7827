// RankMemories: allocates and reuses ranks' device memory.
#include "cuda/device/rank_memory.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "core/memory/tally.h"
#include "cuda/device/driver.h"

namespace ep_runtime {
namespace cuda {
namespace {

template <typename T>
Status AllocateHost(T** out) {
  void* memory = nullptr;
  EP_RETURN_IF_CUDA(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped));
  *out = static_cast<T*>(memory);  // unified addressing: devices use the same address
  return Status();
}

template <typename T>
Status AllocateDevice(int64_t bytes, T** out) {
  void* memory = nullptr;
  EP_RETURN_IF_CUDA(cudaMalloc(&memory, bytes));
  *out = static_cast<T*>(memory);
  return Status();
}

Status Allocate(const GroupSizes& sizes, RankMemory* out) {
  EP_RETURN_IF_ERROR(AllocateHost(&out->record));
  EP_RETURN_IF_ERROR(AllocateHost(&out->verdict));
  EP_RETURN_IF_ERROR(AllocateHost(&out->bad_index));
  EP_RETURN_IF_ERROR(AllocateDevice(sizeof(DeviceGroup), &out->group));
  EP_RETURN_IF_ERROR(AllocateDevice(kMaxHandles * sizeof(HandleTotals), &out->totals));
  EP_RETURN_IF_ERROR(AllocateDevice(TallyLayout(sizes).tally_bytes, &out->tally));
  return AllocateDevice(ScratchBytes(sizes), &out->scratch);
}

// Clears host memory only after the device has finished using it.
Status Clear(const GroupSizes& sizes, const RankMemory& memory) {
  EP_RETURN_IF_CUDA(cudaDeviceSynchronize());
  EP_RETURN_IF_CUDA(cudaMemset(memory.group, 0, sizeof(DeviceGroup)));
  EP_RETURN_IF_CUDA(cudaMemset(memory.totals, 0, kMaxHandles * sizeof(HandleTotals)));
  EP_RETURN_IF_CUDA(cudaMemset(memory.tally, 0, TallyLayout(sizes).tally_bytes));
  EP_RETURN_IF_CUDA(cudaMemset(memory.scratch, 0, ScratchBytes(sizes)));
  EP_RETURN_IF_CUDA(cudaDeviceSynchronize());
  std::memset(memory.record, 0, sizeof(FailRecord));
  std::memset(memory.verdict, 0, sizeof(DeviceVerdict));
  std::memset(memory.bad_index, 0, sizeof(BadIndex));
  return Status();
}

// Returns a key of everything that a graph depends on: sizes, and settings that choose kernels and
// grids.
std::string KeyOf(const GroupOptions& options, const LaunchSettings& launch, int64_t world_rank,
                  int device) {
  const GroupSizes& sizes = options.sizes;
  std::string key = options.name;
  for (int64_t value :
       {world_rank, int64_t{device}, launch.num_sms, launch.overlap,
        int64_t{options.error_on_overflow}, static_cast<int64_t>(options.combine_precision),
        int64_t{options.debug}, sizes.world_size, sizes.ep_size, sizes.num_experts,
        sizes.hidden_size, sizes.max_tokens_per_rank, sizes.recv_capacity_per_rank, sizes.max_top_k,
        sizes.max_token_bytes, sizes.lanes, sizes.spare_experts}) {
    key += '/';
    key += std::to_string(value);
  }
  return key;
}

}  // namespace

Status RankMemories::Take(const GroupOptions& options, const LaunchSettings& launch,
                          int64_t world_rank, int device, RankMemory* out) {
  std::string key = KeyOf(options, launch, world_rank, device);
  std::lock_guard<std::mutex> lock(mutex_);
  size_t at = 0;
  while (at < idle_.size() && idle_[at].key != key) ++at;
  RankMemory memory{};
  if (at == idle_.size()) {
    EP_RETURN_IF_ERROR(Allocate(options.sizes, &memory));
  } else {
    memory = idle_[at].memory;
  }
  EP_RETURN_IF_ERROR(Clear(options.sizes, memory));
  if (at < idle_.size()) idle_.erase(idle_.begin() + static_cast<int64_t>(at));
  keys_[memory.group] = std::move(key);
  *out = memory;
  return Status();
}

void RankMemories::GiveBack(const std::string& group, const RankMemory& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = keys_.find(memory.group);
  if (found == keys_.end()) return;
  idle_.push_back({group, std::move(found->second), memory});
  keys_.erase(found);
}

bool RankMemories::TakeReplay(const std::string& group, FailRecord* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Idle& idle : idle_) {
    FailRecord* record = idle.memory.record;
    if (idle.group != group || !IsWritten(record->valid)) continue;
    *out = *record;
    record->valid = 0;
    if (static_cast<FailReason>(out->reason) == FailReason::kClosed) return true;
  }
  return false;
}

RankMemories& ProcessRankMemories() {
  static auto* memories = new RankMemories;
  return *memories;
}

bool IsWritten(const uint32_t& valid) {
  const auto* word = reinterpret_cast<const std::atomic<uint32_t>*>(&valid);
  return word->load(std::memory_order_acquire) != 0;
}

}  // namespace cuda
}  // namespace ep_runtime
