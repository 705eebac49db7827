// What a rank's kernels tell on the board while they run: one thread stores, nobody waits for it.
// Records may be read half new; every field of 16 bytes or less is whole.
#ifndef EP_RUNTIME_CUDA_PROGRESS_CUH_
#define EP_RUNTIME_CUDA_PROGRESS_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "core/board.h"
#include "cuda/device_group.h"

namespace ep_runtime {
namespace cuda {

__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Shorter waits are not worth a word.
constexpr uint64_t kTellWaitNs = 1'000'000'000;

__device__ __forceinline__ void StoreBoard(void* record, size_t offset, uint32_t a, uint32_t b,
                                           uint32_t c, uint32_t d) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                   static_cast<uint8_t*>(record) + offset),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void StoreBoard(void* record, size_t offset, uint64_t a, uint64_t b) {
  asm volatile(
      "st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(static_cast<uint8_t*>(record) + offset),
      "l"(a), "l"(b)
      : "memory");
}
__device__ __forceinline__ void StoreBoard(void* record, size_t offset, uint64_t value) {
  *reinterpret_cast<volatile uint64_t*>(static_cast<uint8_t*>(record) + offset) = value;
}

// Fields that are stored together.
static_assert(offsetof(RankRecord, sequence) == 0 && offsetof(RankRecord, state) == 4 &&
              offsetof(RankRecord, op) == 8 && offsetof(RankRecord, waiting_for) == 12);
static_assert(offsetof(RankRecord, handle) == offsetof(RankRecord, layer_id) + 8 &&
              offsetof(RankRecord, lane) == offsetof(RankRecord, layer_id) + 12);
static_assert(offsetof(RankRecord, since_ns) == offsetof(RankRecord, epoch) + 8);
static_assert(offsetof(RankRecord, calls) == offsetof(RankRecord, progress_ns) + 8);
static_assert(offsetof(RankRecord, dropped_rows) == offsetof(RankRecord, rows) + 8);
static_assert(offsetof(HandleRecord, state) == 0 && offsetof(HandleRecord, last_op) == 4 &&
              offsetof(HandleRecord, lane) == 8);
static_assert(offsetof(HandleRecord, calls) == offsetof(HandleRecord, epoch) + 8);

__device__ __forceinline__ void TellState(const Progress& progress, RankState state, uint32_t op,
                                          int32_t waiting_for) {
  StoreBoard(progress.rank, 0, 0, static_cast<uint32_t>(state), op,
             static_cast<uint32_t>(waiting_for));
}

__device__ __forceinline__ void TellHandle(const Progress& progress, uint32_t index,
                                           HandleState state, uint32_t op, int32_t lane) {
  StoreBoard(progress.handles, index * sizeof(HandleRecord), static_cast<uint32_t>(state), op,
             static_cast<uint32_t>(lane), 0);
}

// By one thread of the kernel, as the call begins. `index`: of the handle's record.
__device__ inline void TellBegin(DeviceGroup* group, uint64_t epoch, uint64_t layer_id,
                                 uint32_t handle, uint32_t op, uint32_t index) {
  Progress& progress = group->progress;
  if (progress.rank == nullptr || index >= kMaxHandles) return;
  const uint64_t now_ns = *static_cast<const volatile uint64_t*>(progress.now_ns);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(&progress.totals[index]));
  const auto lane = static_cast<int32_t>(epoch % group->lanes);
  progress.call_index = index;
  TellState(progress, RankState::kRunning, op, -1);
  TellHandle(progress, index, HandleState::kBusy, op, lane);
  StoreBoard(progress.rank, offsetof(RankRecord, layer_id), static_cast<uint32_t>(layer_id),
             static_cast<uint32_t>(layer_id >> 32), handle, static_cast<uint32_t>(lane));
  StoreBoard(progress.rank, offsetof(RankRecord, epoch), epoch, now_ns);
  progress.call_epoch = epoch;
  progress.call_now_ns = now_ns;
  progress.call_timer_ns = GlobalTimerNs();
}

// What the running call counts; before the block that calls it ends.
__device__ inline void CountRows(DeviceGroup* group, uint64_t rows, uint64_t dropped_rows) {
  group->progress.call_rows = rows;
  group->progress.call_dropped_rows = dropped_rows;
}

// A wait that has lasted since `started_ns` of the device's clock; `source` is an EP rank.
__device__ inline void TellWait(const DeviceGroup* group, uint32_t op, int source,
                                uint64_t started_ns) {
  const Progress& progress = group->progress;
  if (progress.rank == nullptr || __ldcg(&progress.call_epoch) != group->epoch + 1) return;
  StoreBoard(progress.rank, offsetof(RankRecord, since_ns),
             __ldcg(&progress.call_now_ns) + (started_ns - __ldcg(&progress.call_timer_ns)));
  TellState(progress, RankState::kWaiting, op, group->first_rank + source);
}

// After a wait long enough to have been told. Others of the rank that still wait tell it again.
__device__ inline void TellArrived(const DeviceGroup* group, uint32_t op, uint64_t started_ns) {
  const Progress& progress = group->progress;
  if (progress.rank == nullptr || GlobalTimerNs() - started_ns < kTellWaitNs) return;
  TellState(progress, RankState::kRunning, op, -1);
}

// By one thread of the last block that ends, before the epoch advances. What other blocks of the
// kernel wrote is read past the L1 cache.
__device__ inline void TellEnd(DeviceGroup* group, uint64_t epoch, uint32_t op) {
  Progress& progress = group->progress;
  // A closed group has no board any more.
  const bool open = *static_cast<const volatile uint32_t*>(&group->open) != 0;
  if (progress.rank == nullptr || __ldcg(&progress.call_epoch) != epoch || !open) return;
  const uint32_t index = __ldcg(&progress.call_index);
  HandleTotals totals = progress.totals[index];  // used last: it may come from far
  const uint64_t rows = __ldcg(&progress.call_rows);
  const uint64_t dropped_rows = __ldcg(&progress.call_dropped_rows);
  const uint64_t now_ns =
      __ldcg(&progress.call_now_ns) + (GlobalTimerNs() - __ldcg(&progress.call_timer_ns));
  progress.call_rows = progress.call_dropped_rows = 0;
  progress.rows += rows;
  progress.dropped_rows += dropped_rows;
  TellState(progress, RankState::kIdle, op, -1);
  StoreBoard(progress.rank, offsetof(RankRecord, progress_ns), now_ns, epoch);
  StoreBoard(progress.rank, offsetof(RankRecord, rows), progress.rows, progress.dropped_rows);
  const auto code = static_cast<OpCode>(op);
  const bool ends = code == OpCode::kCombine || code == OpCode::kDispatchBwd;
  TellHandle(progress, index, ends ? HandleState::kIdle : HandleState::kOpen, op,
             static_cast<int32_t>(epoch % group->lanes));
  const size_t record = index * sizeof(HandleRecord);
  StoreBoard(progress.handles, record + offsetof(HandleRecord, updated_ns), now_ns);
  totals.calls += 1;
  totals.rows += rows;
  totals.dropped_rows += dropped_rows;
  progress.totals[index] = totals;
  if (group->first_rank + group->ep_rank == 0) {
    StoreBoard(progress.handles, record + offsetof(HandleRecord, epoch), epoch, totals.calls);
  }
  StoreBoard(progress.device_rows, index * sizeof(DeviceRows), totals.rows, totals.dropped_rows);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_PROGRESS_CUH_
