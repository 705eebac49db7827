// PlanArrays: the arrays of a plan.
#ifndef EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_
#define EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_

namespace ep_runtime {

// The nine arrays that `prepare` writes and every other op reads. A *staged row* is one token of
// one source that keeps at least one row on this rank; it has one or more *entries*, one per kept
// row.
template <typename Int>
struct PlanArrays {
  Int* dst_rank;  // [T, K] EP rank of the slot's row, -1 unused or dropped
  Int* dst_row;   // [T, K] row in that rank's slab, -1 unused or dropped
  // [N, 4] per source: staged rows, entries, staged rows of the first ceil(T / 2) tokens, and 0. If
  // the plan was made over NCCL or for copies of experts, the last number of source 0 is how many
  // slots were dropped, for dispatch to count. A packed call (LaneRoom) has [N, 4 + 2 * N]: further
  // columns have the source's staged rows for each rank, in total and from the first half of the
  // tokens.
  Int* recv_count;
  Int* staged_start;  // [N * T + 1] first entry of each staged row, sources in order; the unused
                      // tail is filled with the number of entries
  Int* staged_row;    // [C] slab row of each entry; unused tail -1
  Int* staged_slot;   // [C] slot k of each entry; unused tail -1
  Int* kept;          // [L] rows kept per local expert
  Int* group_sizes;   // [L] the same, rounded up to the alignment
  Int* num_recv;      // [1] aligned rows demanded, before any drop
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_PLAN_ARRAYS_H_
