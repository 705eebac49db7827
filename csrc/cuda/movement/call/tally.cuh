// Adds up times, waits and load of a rank's calls on the device, and stores them to the board.
//
// A call writes its waits for late peers to device memory while it waits, and its time when it
// ends. One warp of the next call, which nobody waits for, adds both to sums and stores the sums to
// the board. So the board is one call behind.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_TALLY_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_TALLY_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "core/memory/board.h"
#include "cuda/device/device_group.h"
#include "cuda/movement/call/progress.cuh"

namespace ep_runtime {
namespace cuda {

// Shorter waits are only the latency of a word from a peer, so they are not counted.
constexpr uint64_t kCountedWaitNs = uint64_t{1} << kBucketBits;

static_assert(offsetof(OpRecord, calls) == 0 && offsetof(OpRecord, time_ns) == 8 &&
              offsetof(OpRecord, wait_ns) == 16);
static_assert(offsetof(LoadRecord, calls) == 0 && offsetof(LoadRecord, time_ns) == 8 &&
              offsetof(LoadRecord, wait_ns) == 16 && offsetof(LoadRecord, tokens) == 24);
static_assert(offsetof(PeerRecord, wait_ns) == 8);

// Returns the array [N] in which the running call notes its wait for each peer; null if nothing is
// reported.
__device__ __forceinline__ uint32_t* WaitsOf(DeviceGroup* group, uint64_t epoch) {
  return group->progress.rank != nullptr ? group->progress.tally.waits[epoch % 2] : nullptr;
}

// Notes a finished wait for a word of `source`.
__device__ __forceinline__ void NoteWait(uint32_t* waits, int source, uint64_t waited_ns) {
  if (waits == nullptr || waited_ns < kCountedWaitNs) return;
  atomicMax(&waits[source], static_cast<uint32_t>(min(waited_ns, uint64_t{UINT32_MAX})));
}

// Adds `rows` [L] of this rank's experts, and its tokens, to the load. One warp calls this and does
// not wait.
__device__ inline void CountLoad(DeviceGroup* group, const CallName& name, int32_t tokens,
                                 const int32_t* rows, int32_t experts) {
  const DeviceTally& tally = group->progress.tally;
  const uint32_t index = BoardIndex(name);
  if (group->progress.rank == nullptr || index >= kMaxLoads || MadeAgain(name)) return;
  auto* words = reinterpret_cast<unsigned long long*>(tally.sums + tally.loads_offset +
                                                      index * tally.load_bytes);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) atomicAdd(&words[offsetof(LoadRecord, tokens) / 8], tokens);
  for (int e = lane; e < experts; e += 32) {
    if (rows[e] > 0) atomicAdd(&words[sizeof(LoadRecord) / 8 + e], rows[e]);
  }
}

// One lane's share of the previous call's additions to the rank's sums.
struct TallyNote {
  bool tells = false;
  bool of_prepare = false;
  uint32_t index = 0;  // number of the handle's record
  int64_t word = -1;   // offset of `sum`, a sum with the call added
  uint64_t sum = 0;
  int64_t peer = -1;  // offset of `peer_sums` in a PeerRecord, likewise
  ulonglong2 peer_sums{};
};

__device__ __forceinline__ uint64_t ReadSum(const DeviceTally& tally, int64_t offset) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(tally.sums + offset));
}

// BucketOf of board.h, for the device.
__device__ __forceinline__ uint32_t DeviceBucketOf(uint64_t ns) {
  const uint64_t left = ns >> kBucketBits;
  return left == 0 ? 0 : min(64 - static_cast<uint32_t>(__clzll(left)), kTimeBuckets - 1);
}

// Chooses the sum that each lane updates: five lanes have words of the op's record, three of the
// handle's.
__device__ inline void NoteSum(const DeviceTally& tally, const LastCall& last, uint32_t wait_ns,
                               TallyNote* note) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t added[] = {1, last.took_ns, wait_ns};
  const auto op = static_cast<int64_t>(last.op * sizeof(OpRecord));
  uint64_t more = 1;
  if (lane < 3) {
    note->word = op + lane * 8;
    more = added[lane];
  } else if (lane == 3) {
    note->word = op + offsetof(OpRecord, times) + DeviceBucketOf(last.took_ns) * 8;
  } else if (lane == 4) {
    note->word = op + offsetof(OpRecord, waits) + DeviceBucketOf(wait_ns) * 8;
  } else if (lane >= 8 && lane < 11 && last.index < kMaxLoads) {
    note->word = tally.loads_offset + last.index * tally.load_bytes + (lane - 8) * 8;
    more = added[lane - 8];
  }
  if (note->word >= 0) note->sum = ReadSum(tally, note->word) + more;
}

// Reads the sums, and adds the previous call. One warp calls this when call `epoch` begins, before
// the call waits. It writes nothing.
__device__ inline TallyNote ReadTally(DeviceGroup* group, uint64_t epoch) {
  TallyNote note;
  const DeviceTally& tally = group->progress.tally;
  if (group->progress.rank == nullptr) return note;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t waited = lane < group->ep_size ? __ldcg(&tally.waits[(epoch - 1) % 2][lane]) : 0;
  const LastCall last = {__ldcg(&tally.last.epoch), __ldcg(&tally.last.took_ns),
                         __ldcg(&tally.last.index), __ldcg(&tally.last.op)};
  if (last.epoch != epoch - 1 || last.op == 0 || last.op >= kTallyOps) return note;
  note.tells = true;
  note.of_prepare = static_cast<OpCode>(last.op) == OpCode::kPrepare;
  note.index = last.index;
  const uint32_t most = __reduce_max_sync(~0u, waited);
  const int ended_by = __ffs(__ballot_sync(~0u, waited == most)) - 1;
  // A block may begin to wait before the first block begins, which starts the call's time.
  const auto longest = static_cast<uint32_t>(min(uint64_t{most}, last.took_ns));
  NoteSum(tally, last, longest, &note);
  if (waited == 0) return note;
  note.peer = tally.peers_offset +
              (last.op * group->ep_size + lane) * static_cast<int64_t>(sizeof(PeerRecord));
  note.peer_sums = __ldcg(reinterpret_cast<const ulonglong2*>(tally.sums + note.peer));
  note.peer_sums.x += waited;
  if (lane == ended_by) note.peer_sums.y += longest;
  return note;
}

// Stores the sums. The warp that called ReadTally calls this while the call runs.
__device__ inline void TellTally(DeviceGroup* group, const TallyNote& note, uint64_t epoch) {
  if (group->progress.rank == nullptr) return;
  DeviceTally& tally = group->progress.tally;
  const int lane = static_cast<int>(threadIdx.x % 32);
  tally.waits[(epoch - 1) % 2][lane] = 0;  // the next call notes its waits there
  if (!note.tells) return;
  if (note.word >= 0) {
    *reinterpret_cast<uint64_t*>(tally.sums + note.word) = note.sum;
    StoreBoard(tally.board, note.word, note.sum);
  }
  if (note.peer >= 0) {
    *reinterpret_cast<ulonglong2*>(tally.sums + note.peer) = note.peer_sums;
    StoreBoard(tally.board, note.peer, note.peer_sums.x, note.peer_sums.y);
  }
  if (!note.of_prepare || note.index >= kMaxLoads) return;
  const int64_t load = tally.loads_offset + note.index * tally.load_bytes;
  const int64_t end = load + sizeof(LoadRecord) + group->progress.tally.experts * 8;
  for (int64_t at = load + offsetof(LoadRecord, tokens) + lane * 8; at < end; at += 32 * 8) {
    StoreBoard(tally.board, at, ReadSum(tally, at));
  }
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_TALLY_CUH_
