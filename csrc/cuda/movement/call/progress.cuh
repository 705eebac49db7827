// Writes a rank's progress to the board while its kernels run. One thread stores; nobody waits for
// it. Readers may see a partly updated record, but no torn field of 16 bytes or less.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_PROGRESS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_PROGRESS_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "core/base/layer_index.h"
#include "core/memory/board.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Shorter waits are not reported.
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

// Fields that one store writes must be next to each other.
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

// Returns the index of the call's layer in its stack, as ReadLayerIndex does.
__device__ inline int32_t LayerOf(const CallName& name) {
  const int32_t operand = name.layer_index != nullptr ? *name.layer_index : 0;
  return operand >= kMadeAgain ? operand - kMadeAgain : operand;
}

// Whether the call repeats an earlier call of the step, so that its rows are not counted again.
__device__ inline bool MadeAgain(const CallName& name) {
  return name.layer_index != nullptr && *name.layer_index >= kMadeAgain;
}

__device__ inline uint32_t BoardIndex(const CallName& name) {
  return name.board_index + LayerOf(name) * name.board_stride;
}

// Values that the reporting thread reads early, because reads of host memory are slow.
struct BoardNote {
  uint64_t timer_ns = 0;  // read first, because other blocks do not wait for the slow reads
  uint64_t now_ns = 0;
  uint64_t calls = 0;
  bool tells = false;
};

__device__ __forceinline__ BoardNote ReadBoard(const DeviceGroup* group, uint32_t index) {
  const Progress& progress = group->progress;
  BoardNote note;
  note.tells = progress.rank != nullptr && index < kMaxHandles;
  if (!note.tells) return note;
  note.timer_ns = GlobalTimerNs();
  note.now_ns = *static_cast<const volatile uint64_t*>(progress.now_ns);
  note.calls = progress.totals[index].calls;
  return note;
}

// Reports the start of a call. One thread of the kernel calls this. `index` is the number of the
// handle's record.
__device__ inline void TellBegin(DeviceGroup* group, const BoardNote& note, uint64_t epoch,
                                 uint64_t layer_id, uint32_t handle, uint32_t op, uint32_t index) {
  if (!note.tells) return;
  Progress& progress = group->progress;
  progress.start = {epoch, note.now_ns, note.timer_ns, index};
  const auto lane = static_cast<int32_t>(epoch % group->lanes);
  TellState(progress, RankState::kRunning, op, -1);
  StoreBoard(progress.rank, offsetof(RankRecord, layer_id), static_cast<uint32_t>(layer_id),
             static_cast<uint32_t>(layer_id >> 32), handle, static_cast<uint32_t>(lane));
  StoreBoard(progress.rank, offsetof(RankRecord, epoch), epoch, note.now_ns);
  TellHandle(progress, index, HandleState::kBusy, op, lane);
  if (!progress.counts_calls) return;
  progress.totals[index].calls = note.calls + 1;
  StoreBoard(progress.handles, index * sizeof(HandleRecord) + offsetof(HandleRecord, epoch), epoch,
             note.calls + 1);
}

// Counts rows of the running call. One thread calls this, and nobody waits for it.
__device__ inline void CountRows(DeviceGroup* group, const CallName& name, uint64_t rows,
                                 uint64_t dropped_rows) {
  Progress& progress = group->progress;
  const uint32_t index = BoardIndex(name);
  if (rows + dropped_rows == 0 || MadeAgain(name) || progress.rank == nullptr ||
      index >= kMaxHandles)
    return;
  HandleTotals& totals = progress.totals[index];
  totals.rows += rows;
  totals.dropped_rows += dropped_rows;
  progress.rows += rows;
  progress.dropped_rows += dropped_rows;
  StoreBoard(progress.device_rows, index * sizeof(DeviceRows), totals.rows, totals.dropped_rows);
  StoreBoard(progress.rank, offsetof(RankRecord, rows), progress.rows, progress.dropped_rows);
}

// Counts a block call's chunks beyond the first. One thread of an EP group's first rank calls this.
// The board shows the EP group that ran the most.
__device__ inline void CountRounds(DeviceGroup* group, uint32_t index, uint64_t rounds) {
  Progress& progress = group->progress;
  const bool open = *static_cast<const volatile uint32_t*>(&group->open) != 0;
  if (progress.rank == nullptr || index >= kMaxHandles || group->ep_rank != 0 || !open) return;
  HandleTotals& totals = progress.totals[index];
  totals.rounds += rounds;
  const size_t at = index * sizeof(HandleRecord) + offsetof(HandleRecord, rounds);
  const auto* told = reinterpret_cast<const volatile uint64_t*>(
      static_cast<const uint8_t*>(progress.handles) + at);
  if (*told < totals.rounds) StoreBoard(progress.handles, at, totals.rounds);
}

// Reads the start of the running call. The first block wrote it, so other blocks bypass the L1
// cache.
__device__ __forceinline__ CallStart ReadStart(const DeviceGroup* group) {
  const CallStart& start = group->progress.start;
  return {__ldcg(&start.epoch), __ldcg(&start.now_ns), __ldcg(&start.timer_ns),
          __ldcg(&start.index)};
}

// Reports a wait that has lasted since `started_ns` of the device's clock. `source` is the EP rank
// waited for.
__device__ inline void TellWait(const DeviceGroup* group, uint32_t op, int source,
                                uint64_t started_ns) {
  const Progress& progress = group->progress;
  if (progress.rank == nullptr) return;
  const CallStart start = ReadStart(group);
  if (start.epoch != __ldcg(&group->epoch) + 1) return;
  StoreBoard(progress.rank, offsetof(RankRecord, since_ns),
             start.now_ns + (started_ns - start.timer_ns));
  TellState(progress, RankState::kWaiting, op, group->first_rank + source);
}

// Reports the end of a wait that was long enough to be reported. Blocks of this rank that still
// wait report their waits again.
__device__ inline void TellArrived(const DeviceGroup* group, uint32_t op, uint64_t started_ns) {
  const Progress& progress = group->progress;
  if (progress.rank == nullptr || GlobalTimerNs() - started_ns < kTellWaitNs) return;
  TellState(progress, RankState::kRunning, op, -1);
}

// Reports the end of a call. One thread of the last block to end calls this, before the epoch
// advances. `start` is the start that this block read when it ended; it belongs to an earlier call
// if the first block had not stored its start yet.
__device__ inline void TellEnd(DeviceGroup* group, CallStart start, uint64_t epoch, uint32_t op) {
  Progress& progress = group->progress;
  if (progress.rank == nullptr) return;
  if (start.epoch != epoch) start = ReadStart(group);
  // A closed group no longer has a board.
  const bool open = *static_cast<const volatile uint32_t*>(&group->open) != 0;
  if (start.epoch != epoch || !open) return;
  const uint64_t took_ns = GlobalTimerNs() - start.timer_ns;
  const uint64_t now_ns = start.now_ns + took_ns;
  progress.tally.last = {epoch, took_ns, start.index, op};
  const auto code = static_cast<OpCode>(op);
  const bool ends = code == OpCode::kCombine || code == OpCode::kDispatchBwd;
  TellState(progress, RankState::kIdle, op, -1);
  StoreBoard(progress.rank, offsetof(RankRecord, progress_ns), now_ns, epoch);
  TellHandle(progress, start.index, ends ? HandleState::kIdle : HandleState::kOpen, op,
             static_cast<int32_t>(epoch % group->lanes));
  StoreBoard(progress.handles,
             start.index * sizeof(HandleRecord) + offsetof(HandleRecord, updated_ns), now_ns);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_PROGRESS_CUH_
