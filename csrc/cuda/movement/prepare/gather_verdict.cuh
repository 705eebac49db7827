// on_overflow="error": reports to all ranks of the world which rank exceeds its capacity.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_GATHER_VERDICT_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_GATHER_VERDICT_CUH_

#include "cuda/movement/prepare/lay_out_rows.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

// One warp sends to all ranks of all domains the first rank of this domain that exceeds its
// capacity, then finds the lowest such rank of all domains. Verdicts have their own sequence
// numbers, and two slots, because domains share no epochs.
__device__ inline void GatherVerdict(const DeviceCall& call, const PrepareParams& params,
                                     const Experts& experts) {
  const int lane = threadIdx.x % 32;
  DeviceGroup* group = call.group;
  const uint64_t sequence = group->verdicts + 1;
  const int64_t slot = static_cast<int64_t>(sequence % kVerdictSlots) * group->world_size;
  DeviceVerdict mine{-1, 0, MostKept(params)};
  for (int rank = call.ranks - 1; rank >= 0; --rank) {
    const int64_t demand = Zones(experts.demand + rank * params.sizes.experts, params.sizes.experts,
                                 INT32_MAX, params.alignment);
    if (demand <= mine.capacity) continue;
    mine.rank = group->first_rank + rank;
    mine.demand = static_cast<int32_t>(min(demand, int64_t{INT32_MAX}));
  }
  const auto line = [&](int dest, int source) {
    // Windows of other domains have the same stride as this domain's.
    uint8_t* window = group->windows + int64_t{dest - group->first_rank} * group->window_stride;
    return reinterpret_cast<VerdictLine*>(window + group->verdicts_offset) + slot + source;
  };
  for (int dest = lane; dest < group->world_size; dest += 32) {
    VerdictLine* sent = line(dest, group->first_rank + call.me);
    sent->rank = mine.rank;
    sent->demand = mine.demand;
    sent->capacity = mine.capacity;
    StoreReleaseSys(&sent->sequence, sequence);
  }
  DeviceVerdict lowest{INT32_MAX, 0, 0};
  const uint64_t started_ns = GlobalTimerNs();
  bool alive = true;
  for (int source = lane; source < group->world_size; source += 32) {
    const VerdictLine* got = line(group->first_rank + call.me, source);
    for (uint32_t polls = 1; alive && LoadAcquireSys(&got->sequence) != sequence; ++polls) {
      if (polls % kPollsPerLook == 0) alive = KeepWaiting(call, -1, 0, 0, started_ns);
    }
    if (!alive) break;
    const volatile VerdictLine* seen = got;
    if (seen->rank >= 0 && seen->rank < lowest.rank) {
      lowest = {seen->rank, seen->demand, seen->capacity};
    }
  }
  if (!__all_sync(~0u, alive)) return;
  const int32_t rank = __reduce_min_sync(~0u, lowest.rank);
  const uint32_t holder = __ballot_sync(~0u, lowest.rank == rank);
  if (lane == __ffs(holder) - 1) {
    *params.verdict = rank == INT32_MAX ? DeviceVerdict{-1, 0, mine.capacity} : lowest;
  }
  if (lane == 0) group->verdicts = sequence;
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_GATHER_VERDICT_CUH_
