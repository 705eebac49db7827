// One rank's part of a call on the device: epoch and lane, flags, bounded waits, and the end.
//
// A group's calls on one rank run one after another. Each call has an epoch, one more than the
// last, and uses lane epoch % lanes of every window. Call e first reports to all ranks that it has
// begun (CallLine). It ends only once all ranks have begun call e, and so have ended call e - 1. A
// rank that begins call e therefore knows that call e - 2 is over everywhere: with two lanes or
// more, nobody still reads the lane that it overwrites. Flags are not cleared: a flag holds the tag
// of a call, computed from its epoch and name.
//
// Every wait for another block or rank regularly checks for reasons to end early: a failure of this
// rank, a poisoned generation, a closed group, the budget, a peer that runs another call.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_CALL_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_CALL_CUH_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"
#include "cuda/fill.cuh"
#include "cuda/movement/call/progress.cuh"
#include "cuda/movement/call/tally.cuh"
#include "cuda/wanted.cuh"

namespace ep_runtime {
namespace cuda {

__device__ __forceinline__ uint32_t LoadAcquireSys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t LoadAcquireSys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t LoadAcquireGpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t LoadAcquireGpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void StoreReleaseSys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void StoreReleaseSys(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void StoreRelaxedSys(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void FenceSys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void AddReleaseGpu(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t AddOrderedGpu(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// Polls between two checks for reasons to end a wait early. Each check reads host memory, which is
// slow.
constexpr uint32_t kPollsPerLook = 1024;

// State of a call, equal in every thread of a block. `dead` is the state at the start only: waits
// also check the group.
struct DeviceCall {
  DeviceGroup* group;
  uint64_t epoch;
  uint64_t generation;
  uint64_t layer_id;
  uint32_t handle;
  uint32_t op;
  uint32_t tag;  // flag word of this call: 24 bits of epoch, 8 of name
  int32_t me;
  int32_t ranks;
  int64_t lane;
  uint32_t* waits;  // see WaitsOf
  bool dead;

  __device__ uint8_t* Window(int rank) const {
    return group->windows + rank * group->window_stride;
  }
  __device__ uint8_t* Lane(int rank) const { return Window(rank) + lane * group->lane_bytes; }
  __device__ uint8_t* Flags(int rank) const {
    return Window(rank) + group->flags_offset + lane * group->flag_lane_bytes;
  }
  // Parts of `dest`'s lane that `source` writes.
  __device__ uint8_t* Entries(int dest, int source) const {
    return Lane(dest) + group->entries_offset + source * group->source_entries_bytes;
  }
  __device__ int32_t* Counts(int dest, int source) const {
    return reinterpret_cast<int32_t*>(Lane(dest) + group->counts_offset +
                                      source * group->source_counts_bytes);
  }
  __device__ CallLine* Line(int dest, int source) const {
    return reinterpret_cast<CallLine*>(Flags(dest)) + source;
  }
  __device__ uint32_t* CountsFlag(int dest, int source) const {
    return reinterpret_cast<uint32_t*>(Flags(dest) + group->flag_counts_offset +
                                       source * kFlagLine);
  }
  __device__ uint32_t* EntriesFlag(int dest, int source, int block) const {
    return reinterpret_cast<uint32_t*>(Flags(dest) + group->flag_entries_offset) +
           source * kMaxPrepareBlocks + block;
  }
  __device__ uint32_t* Ready(int dest, int source) const {
    return reinterpret_cast<uint32_t*>(Flags(dest) + group->ready_offset +
                                       source * group->ready_stride);
  }
};

__device__ inline bool Failed(const DeviceCall& call) {
  return LoadRelaxed(&call.group->failed) != 0;
}

__device__ inline bool Poisoned(const DeviceCall& call) {
  const uint64_t poison =
      *reinterpret_cast<const volatile uint64_t*>(call.group->poison_generation);
  return poison >= call.generation;
}

// Reports the failure to the host, if no other wait has failed yet. All other waits see `failed`
// and end too.
__device__ inline void Fail(const DeviceCall& call, FailReason reason, int source, uint32_t seen,
                            uint32_t expected, uint64_t waited_ns) {
  if (atomicCAS(&call.group->failed, 0u, 1u) != 0) return;
  volatile FailRecord* record = call.group->record;
  record->reason = static_cast<uint32_t>(reason);
  record->op = call.op;
  record->handle = call.handle;
  record->layer_id = call.layer_id;
  record->generation = call.generation;
  record->epoch = call.epoch;
  record->waiting_for = source;
  record->seen = seen;
  record->expected = expected;
  record->waited_ns = waited_ns;
  if (reason == FailReason::kMismatch) {
    const volatile CallLine* line = call.Line(call.me, source);
    record->peer_op = line->op;
    record->peer_handle = line->handle;
    record->peer_layer_id = line->layer_id;
  }
  __threadfence_system();
  record->valid = 1;
}

__device__ inline bool PeerRunsAnother(const DeviceCall& call, int source) {
  const CallLine* line = call.Line(call.me, source);
  if (LoadAcquireSys(&line->epoch) != call.epoch) return false;
  const volatile CallLine* seen = line;
  return seen->op != call.op || seen->handle != call.handle || seen->layer_id != call.layer_id ||
         seen->generation != call.generation;
}

// Time after which waits in a closed group fail. Calls that all ranks have begun end long before,
// and a rank whose group is closed begins no call.
constexpr uint64_t kClosedWaitNs = 500'000'000;

// Returns whether a wait may continue. If not, the reason has been recorded.
__device__ inline bool KeepWaiting(const DeviceCall& call, int source, uint32_t seen,
                                   uint32_t expected, uint64_t started_ns) {
  if (Failed(call)) return false;
  const uint64_t waited_ns = GlobalTimerNs() - started_ns;
  FailReason reason = FailReason::kNone;
  if (Poisoned(call)) {
    reason = FailReason::kPoisoned;
  } else if (waited_ns > kClosedWaitNs && LoadRelaxed(&call.group->open) == 0) {
    reason = FailReason::kClosed;
  } else if (waited_ns > call.group->budget_ns) {
    reason = FailReason::kTimeout;
  } else if (source >= 0 && PeerRunsAnother(call, source)) {
    reason = FailReason::kMismatch;
  }
  if (reason == FailReason::kNone) {
    if (source >= 0 && waited_ns > kTellWaitNs) TellWait(call.group, call.op, source, started_ns);
    return true;
  }
  Fail(call, reason, source, seen, expected, waited_ns);
  return false;
}

static __device__ __noinline__ bool AwaitWordSlowly(const DeviceCall& call, const uint32_t* word,
                                                    uint32_t expected, int source) {
  const uint64_t started_ns = GlobalTimerNs();
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t seen = LoadAcquireSys(word);
    if (seen == expected) {
      NoteWait(call.waits, source, GlobalTimerNs() - started_ns);
      if (polls > kPollsPerLook) TellArrived(call.group, call.op, started_ns);
      return true;
    }
    if (polls % kPollsPerLook == 0 && !KeepWaiting(call, source, seen, expected, started_ns)) {
      return false;
    }
    __nanosleep(20);
  }
}

// Waits until `source` has stored `expected` to one of this rank's flags. Returns false if the call
// failed.
__device__ __forceinline__ bool AwaitWord(const DeviceCall& call, const uint32_t* word,
                                          uint32_t expected, int source) {
  if (LoadAcquireSys(word) == expected) return true;
  return AwaitWordSlowly(call, word, expected, source);
}

// One thread waits until `blocks` blocks have reached a barrier. Returns false if the call failed.
__device__ inline bool AwaitBlocks(const DeviceCall& call, int barrier, uint32_t blocks) {
  const uint32_t* arrived = &call.group->arrived[barrier];
  const uint64_t started_ns = GlobalTimerNs();
  for (uint32_t polls = 1; LoadAcquireGpu(arrived) < blocks; ++polls) {
    if (polls % kPollsPerLook == 0 && !KeepWaiting(call, -1, 0, blocks, started_ns)) return false;
  }
  return true;
}

// Syncs `blocks` blocks of this kernel, all of which must be resident at once. Every thread of the
// block calls this. Returns false if the call failed on any block.
__device__ inline bool MeetBlocks(const DeviceCall& call, int barrier, uint32_t blocks) {
  __syncthreads();
  if (blocks == 1) return true;
  bool alive = true;
  if (threadIdx.x == 0) {
    AddReleaseGpu(&call.group->arrived[barrier], 1);
    alive = AwaitBlocks(call, barrier, blocks);
  }
  return __syncthreads_and(alive);
}

__device__ inline uint32_t TagOf(uint64_t epoch, uint64_t layer_id, uint32_t handle, uint32_t op) {
  const uint64_t name = (layer_id ^ (uint64_t{handle} << 3) ^ op) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint32_t>(epoch << 8) | static_cast<uint32_t>(name >> 56);
}

// Every kernel calls this first. Only LeftOut may be called before: it decides, alike on all ranks,
// that the launch takes no epoch. The epoch is in device memory, so that a replayed graph takes a
// new epoch.
__device__ inline DeviceCall BeginCall(DeviceGroup* group, const CallName& name, OpCode op) {
  DeviceCall call;
  call.group = group;
  call.epoch = __ldcg(&group->epoch) + 1;  // a kernel of several calls advances it
  call.generation = group->generation;
  call.layer_id = name.layer_id + LayerOf(name);
  call.handle = name.handle;
  call.op = static_cast<uint32_t>(op);
  call.tag = TagOf(call.epoch, call.layer_id, call.handle, call.op);
  call.me = group->ep_rank;
  call.ranks = group->ep_size;
  call.lane = static_cast<int64_t>(call.epoch % group->lanes);
  call.waits = WaitsOf(group, call.epoch);
  bool alive = true;
  if (threadIdx.x == 0) {
    const bool failed = Failed(call), open = LoadRelaxed(&group->open) != 0;
    if (!failed && !open) Fail(call, FailReason::kClosed, -1, 0, 0, 0);
    alive = !failed && open;
  }
  call.dead = !__syncthreads_and(alive);
  return call;
}

// One warp of every kernel reports to all ranks, then on the board, that the call has begun. Only
// this warp checks for poison at the start, because it reads host memory anyway. Only the end of
// the call waits for this warp, and poison also ends that wait.
__device__ inline void TellCall(const DeviceCall& call, const CallName& name) {
  DeviceGroup* group = call.group;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const TallyNote tally = ReadTally(group, call.epoch);
  if (lane < call.ranks) {
    CallLine* line = call.Line(lane, call.me);
    volatile CallLine* fields = line;
    fields->generation = call.generation;
    fields->layer_id = call.layer_id;
    fields->op = call.op;
    fields->handle = call.handle;
    StoreReleaseSys(&line->epoch, call.epoch);
  }
  if (lane == 0) {
    // Issue both reads before using either.
    const BoardNote note = ReadBoard(group, BoardIndex(name));
    if (Poisoned(call)) Fail(call, FailReason::kPoisoned, -1, 0, 0, 0);
    TellBegin(group, note, call.epoch, call.layer_id, call.handle, call.op, BoardIndex(name));
  }
  TellTally(group, tally, call.epoch);
  __syncwarp();
}

constexpr int kEmptyTicket = 2;  // counter in DeviceGroup::arrived that hands out empty rows
constexpr int kItemTicket = 3;   // counter that hands out other work

// Returns the next number of a counter that starts at 0 in every call. One lane calls this.
__device__ inline uint32_t TakeTicketAlone(const DeviceCall& call, int which) {
  return atomicAdd(&call.group->arrived[which], 1u);
}
// Returns the next number of a counter to a whole warp.
__device__ inline uint32_t TakeTicket(const DeviceCall& call, int which) {
  uint32_t ticket = 0;
  if (threadIdx.x % 32 == 0) ticket = TakeTicketAlone(call, which);
  return __shfl_sync(~0u, ticket, 0);
}

// Waits until `source` has begun this call, and so has ended the previous call. Two ranks that
// exchange no rows have no other wait for each other. Without this wait one of them could run ahead
// by a round of lanes, and overwrite rows that the other still reads.
__device__ inline void AwaitBegun(const DeviceCall& call, int source) {
  const uint64_t* epoch = &call.Line(call.me, source)->epoch;
  const uint64_t started_ns = GlobalTimerNs();
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t seen = LoadAcquireSys(epoch);
    if (seen >= call.epoch) return;
    if (polls % kPollsPerLook == 0 && !KeepWaiting(call, source, static_cast<uint32_t>(seen),
                                                   static_cast<uint32_t>(call.epoch), started_ns)) {
      return;
    }
    __nanosleep(20);
  }
}

constexpr uint32_t kDeadBlock =
    1u << 16;  // added to DeviceGroup::ended by a block whose call was dead at the start

// Every thread of every kernel calls this last, or before AwaitEnd. The last block to end advances
// the epoch. After a failure it also overwrites all outputs, so that no partial result survives. If
// the call was dead from the start, its blocks share that work, because nothing else writes the
// outputs. With `more`, this kernel makes another call.
template <int kOutputs>
__device__ inline void EndCall(const DeviceCall& call, const Output (&outputs)[kOutputs],
                               bool more = false) {
  __shared__ bool last, filled;
  DeviceGroup* group = call.group;
  if (!call.dead && blockIdx.x == 0 && threadIdx.x < call.ranks) {
    AwaitBegun(call, static_cast<int>(threadIdx.x));
  }
  if (call.dead) {
    const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (int i = 0; i < kOutputs; ++i) {
      FillOutput(outputs[i], thread, int64_t{gridDim.x} * blockDim.x);
    }
  }
  __syncthreads();
  CallStart start{};
  if (threadIdx.x == 0) {
    start = ReadStart(group);
    const uint32_t mine = call.dead ? 1 + kDeadBlock : 1;
    const uint32_t ended = AddOrderedGpu(&group->ended, mine) + mine;
    last = ended % kDeadBlock == gridDim.x;
    filled = ended / kDeadBlock == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  // A rank with a bad index does not overwrite its plans: its calls continue, because its peers
  // wait for them.
  const bool failed = Failed(call);
  const bool spoiled = LoadRelaxed(&group->spoiled) != 0;
  if (!filled && (failed || (spoiled && call.op != static_cast<uint32_t>(OpCode::kPrepare)))) {
    for (int i = 0; i < kOutputs; ++i) FillOutput(outputs[i], threadIdx.x, blockDim.x);
  }
  if (threadIdx.x == 0) {
    group->ended = 0;
    for (int i = 0; i < kBarriers; ++i) group->arrived[i] = 0;
    TellEnd(group, start, call.epoch, call.op);
    if (more) __threadfence();
    group->epoch = call.epoch;
  }
}

// Waits until all blocks of this rank have ended a call, before this kernel's next one. All blocks
// must be resident at once. Every wait inside a call is bounded, so this one is, too.
__device__ inline void AwaitEnd(const DeviceCall& call) {
  if (threadIdx.x == 0) {
    while (LoadAcquireGpu(&call.group->epoch) < call.epoch) __nanosleep(20);
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_CALL_CUH_
