// Phase 3 of prepare with slots for copies: gives rows of overfull ranks to slots of other ranks.
// Computes the same as `balanced` and `physical_experts` of moe/copies.py, which explain the rule.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_SPREAD_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_SPREAD_ROWS_CUH_

#include "cuda/movement/call/warp_scan.cuh"
#include "cuda/movement/prepare/experts.cuh"

namespace ep_runtime {
namespace cuda {
namespace prepare {

// The rows that one rank takes: those from `start` on, if a giver's rows are on one line, in the
// order of Experts::order.
struct Grant {
  int32_t giver;  // rank
  int32_t place;  // of the giver among givers, those with the largest surplus first
  int32_t start;
  int32_t size;    // 0: the rank takes nothing
  uint32_t chain;  // places of givers: if any of them was short, the rank takes nothing
};

struct SpreadShared {
  int32_t load[kMaxRanks];       // rows kept by each rank
  int32_t sorted[2][kMaxRanks];  // ranks by surplus, and by lack
  Grant grants[kMaxRanks];       // of each rank
  uint32_t is_short;  // places of givers that gave less than they had to, for lack of slots
};

// Computes the grants. One warp calls this.
__device__ inline void MakeGrants(int ranks, int32_t even, uint32_t givers, SpreadShared* shared) {
  const int lane = static_cast<int>(threadIdx.x % 32), last = ranks - 1;
  const bool real = lane < ranks, gives = (givers >> lane & 1) != 0;
  const int32_t load = real ? shared->load[lane] : 0;
  const int32_t surplus = gives ? load - even : 0;
  const int32_t lack = real && !gives ? max(even - load, 0) : 0;
  int place = 0, taker_place = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int32_t others = __shfl_sync(~0u, surplus, rank), needs = __shfl_sync(~0u, lack, rank);
    place += others > surplus || (others == surplus && rank < lane) ? 1 : 0;
    taker_place += needs > lack || (needs == lack && rank < lane) ? 1 : 0;
  }
  if (real) {
    shared->sorted[0][place] = lane;
    shared->sorted[1][taker_place] = lane;
  }
  if (lane == 0) shared->is_short = 0;
  __syncwarp();
  // Givers and takers are on one line now, and a lane is a place among either; grants are overlaps
  // of their intervals.
  const int giver = real ? shared->sorted[0][lane] : 0, taker = real ? shared->sorted[1][lane] : 0;
  const int32_t gone = __shfl_sync(~0u, surplus, giver), wanted = __shfl_sync(~0u, lack, taker);
  const int32_t given = WarpScan(real ? gone : 0);
  const int32_t taken = min(WarpScan(real ? wanted : 0), __shfl_sync(~0u, given, last));
  const int32_t up = __shfl_up_sync(~0u, taken, 1);
  const int32_t before_giver = given - gone, before_taker = lane == 0 ? 0 : up;
  int of_taker = 0, across = 0;
  for (int at = 0; at < ranks; ++at) {
    of_taker += __shfl_sync(~0u, given, at) <= before_taker ? 1 : 0;
    across += __shfl_sync(~0u, taken, at) <= given ? 1 : 0;
  }
  of_taker = min(of_taker, last);
  across = min(across, last);
  // A taker that spans the end of a giver's surplus takes all from it; the next giver compensates.
  const int32_t beyond = __shfl_sync(~0u, taken, across) - given;
  const bool spans = __shfl_sync(~0u, before_taker, across) < given;
  const int32_t over = real && beyond > 0 && spans ? beyond : 0;
  const uint32_t overs = __ballot_sync(~0u, over > 0);
  const int32_t start = before_taker - __shfl_sync(~0u, before_giver, of_taker);
  const int32_t size = taken - before_taker;
  // Back to ranks: each is either a taker, or a giver that takes from the next one.
  const int32_t of_giver = __shfl_sync(~0u, over, place & 31);
  const int32_t taker_start = __shfl_sync(~0u, start, taker_place & 31);
  const int32_t taker_size = __shfl_sync(~0u, size, taker_place & 31);
  const int from_place = __shfl_sync(~0u, of_taker, taker_place & 31);
  if (!real) return;
  const bool as_giver = of_giver > 0;
  Grant grant{};
  grant.place = as_giver ? min(place + 1, last) : from_place;
  grant.giver = shared->sorted[0][grant.place];
  grant.start = as_giver ? 0 : taker_start;
  grant.size = as_giver ? of_giver : taker_size;
  if (as_giver) {
    int first = place;  // givers from here to `place` take from the next one each
    while (first > 0 && (overs >> (first - 1) & 1) != 0) --first;
    grant.chain = (2u << place) - (1u << first);
  }
  shared->grants[lane] = grant;
}

// Sorts experts of givers by rows, those with most first. `threads` threads call this.
__device__ inline void SortExperts(const Experts& experts, uint32_t givers, int thread,
                                   int threads) {
  const int local = experts.local;
  for (int e = thread; e < experts.ranks * local; e += threads) {
    const int rank = e / local, own = e % local;
    if ((givers >> rank & 1) == 0) continue;
    const int32_t* kept = experts.kept + rank * local;
    const int32_t mine = kept[own];
    int place = 0;
    for (int other = 0; other < own; ++other) place += kept[other] >= mine ? 1 : 0;
    for (int other = own + 1; other < local; ++other) place += kept[other] > mine ? 1 : 0;
    experts.order[rank * local + place] = own;
  }
}

// Fills `ends` of a giver. One warp calls this.
__device__ inline void SumExperts(const Experts& experts, int rank) {
  const int lane = static_cast<int>(threadIdx.x % 32), first = rank * experts.local;
  int32_t before = 0;
  for (int at = 0; at < experts.local; at += 32) {
    const bool real = at + lane < experts.local;
    const int32_t rows = real ? experts.kept[first + experts.order[first + at + lane]] : 0;
    const int32_t sum = before + WarpScan(rows);
    if (real) experts.ends[first + at + lane] = sum;
    before = __shfl_sync(~0u, sum, 31);
  }
}

// Gives a rank's slots the largest pieces of its grant. One warp calls this.
__device__ inline void FillSlots(const Experts& experts, int rank, SpreadShared* shared) {
  const Grant grant = shared->grants[rank];
  if (grant.size == 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32), local = experts.local;
  const int32_t* ends = experts.ends + grant.giver * local;
  const int32_t stop = grant.start + grant.size;
  int first = 0, last = 0;  // experts of the first and the last piece
  for (int e = lane; e < local; e += 32) {
    first += ends[e] <= grant.start ? 1 : 0;
    last += ends[e] < stop ? 1 : 0;
  }
  first = __reduce_add_sync(~0u, first);
  last = min(__reduce_add_sync(~0u, last), local - 1);
  const auto piece = [&](int e) {
    return min(stop, ends[e]) - max(grant.start, e == 0 ? 0 : ends[e - 1]);
  };
  // Later pieces are in order, because only the last one may be less than its expert's rows.
  const int32_t of_first = first <= last ? piece(first) : 0;
  int larger = 0;
  for (int e = first + 1 + lane; e <= last; e += 32) larger += piece(e) > of_first ? 1 : 0;
  larger = __reduce_add_sync(~0u, larger);
  int32_t found = 0;
  for (int e = first + lane; e <= last; e += 32) {
    const int32_t rows = piece(e);
    const int slot = e == first ? larger : e - first - 1 + (of_first >= rows ? 1 : 0);
    if (slot >= experts.spare) continue;
    found += rows;
    experts.slots[rank * experts.spare + slot] =
        grant.giver * local + experts.order[grant.giver * local + e];
    experts.rows[rank * experts.physical() + local + slot] = rows;
  }
  found = __reduce_add_sync(~0u, found);
  if (lane == 0 && found < grant.size) atomicOr(&shared->is_short, 1u << grant.place);
}

// Empties slots of a giver that takes nothing, because the rows that were not given away still fill
// it. One warp calls this.
__device__ inline void EmptySlots(const Experts& experts, int rank, SpreadShared* shared) {
  if ((shared->grants[rank].chain & shared->is_short) == 0) return;
  for (int slot = static_cast<int>(threadIdx.x % 32); slot < experts.spare; slot += 32) {
    experts.slots[rank * experts.spare + slot] = -1;
    experts.rows[rank * experts.physical() + experts.local + slot] = 0;
  }
}

// Fills `rows`, `next` and `slots` from the rows that experts keep. Each warp has stored those of
// ranks warp, warp + kWarps, ... Every thread of the block calls this; all see the results.
__device__ inline void SpreadRows(const Experts& experts, SpreadShared* shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int local = experts.local, spare = experts.spare, ranks = experts.ranks;
  __syncwarp();
  for (int rank = warp; rank < ranks; rank += kWarps) {
    int32_t load = 0;
    for (int e = lane; e < local; e += 32) load += experts.kept[rank * local + e];
    load = __reduce_add_sync(~0u, load);
    if (lane == 0) shared->load[rank] = load;
  }
  __syncthreads();
  const int32_t load = lane < ranks ? shared->load[lane] : 0;
  const int32_t even = (__reduce_add_sync(~0u, load) + ranks - 1) / ranks;
  const uint32_t givers = __ballot_sync(~0u, load > even + even * 3 / 100);
  for (int at = static_cast<int>(threadIdx.x); at < ranks * experts.physical(); at += kThreads) {
    const int rank = at / experts.physical(), own = at % experts.physical();
    experts.rows[at] = own < local ? experts.kept[rank * local + own] : 0;
    experts.next[at] = -1;
  }
  for (int at = static_cast<int>(threadIdx.x); at < ranks * spare; at += kThreads) {
    experts.slots[at] = -1;
  }
  if (givers != 0) {
    if (warp == 0) {
      MakeGrants(ranks, even, givers, shared);
    } else {
      SortExperts(experts, givers, static_cast<int>(threadIdx.x) - 32, kThreads - 32);
    }
    __syncthreads();
    for (int rank = warp; rank < ranks; rank += kWarps) {
      if ((givers >> rank & 1) != 0) SumExperts(experts, rank);
    }
    __syncthreads();
    for (int rank = warp; rank < ranks; rank += kWarps) FillSlots(experts, rank, shared);
    __syncthreads();
    for (int rank = warp; rank < ranks; rank += kWarps) EmptySlots(experts, rank, shared);
  }
  __syncthreads();
  if (givers == 0) return;
  // Rows of an expert stay at home first; copies, in order of ranks, get the rest. A rank has at
  // most one copy of an expert.
  for (int rank = ranks - 1; rank >= 0; --rank) {
    if (shared->grants[rank].size == 0) continue;
    for (int slot = static_cast<int>(threadIdx.x); slot < spare; slot += kThreads) {
      const int32_t expert = experts.slots[rank * spare + slot];
      if (expert < 0) continue;
      const int at = rank * experts.physical() + local + slot, home = experts.Home(expert);
      experts.next[at] = experts.next[home];
      experts.next[home] = at;
      experts.rows[home] -= experts.rows[at];
    }
    __syncthreads();
  }
}

}  // namespace prepare
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_SPREAD_ROWS_CUH_
