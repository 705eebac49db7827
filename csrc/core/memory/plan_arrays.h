// PlanArrays: the arrays of a plan.
#ifndef EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_
#define EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_

namespace ep_runtime {

// The nine arrays that `prepare` makes and every other op reads. A *staged row* is one token of
// one source that keeps at least one row here; it has one or more *entries*, one per kept row.
template <typename Int>
struct PlanArrays {
  Int* dst_rank;  // [T, K] EP rank of the slot's row, -1 unused or dropped
  Int* dst_row;   // [T, K] row in that rank's slab, -1 unused or dropped
  // [N, 4] per source: staged rows, entries, staged rows of the first ceil(T / 2) tokens, and 0. If
  // another prepare made the plan, dispatch counts the last number of source 0 as dropped slots.
  // Packed (LaneRoom) [N, 4 + 2 * N]: then the source's staged rows for each rank, and those of the
  // first half.
  Int* recv_count;
  Int* staged_start;  // [N * T + 1] first entry of each staged row, sources in order; the unused
                      // tail holds the number of entries
  Int* staged_row;    // [C] slab row of each entry; unused tail -1
  Int* staged_slot;   // [C] slot k of each entry; unused tail -1
  Int* kept;          // [L] rows kept per local expert
  Int* group_sizes;   // [L] the same, aligned
  Int* num_recv;      // [1] aligned rows demanded, before any drop
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_
