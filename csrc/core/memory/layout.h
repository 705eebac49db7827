// Arithmetic of windows and slabs. `ep_runtime/board.py` and `ep_runtime/layout.py` have the same
// formulas in Python.
#ifndef EP_RUNTIME_CORE_MEMORY_LAYOUT_H_
#define EP_RUNTIME_CORE_MEMORY_LAYOUT_H_

#include <cstdint>

#include "core/memory/board.h"

namespace ep_runtime {

constexpr int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// The static sizes of a group. Letters: T tokens of one rank, K top_k, E experts, L experts of one
// rank, N ranks of one EP group, C rows of one slab, H hidden.
struct GroupSizes {
  int64_t world_size;
  int64_t ep_size;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t max_tokens_per_rank;
  int64_t recv_capacity_per_rank;
  int64_t max_top_k;
  int64_t max_token_bytes;  // bytes of one element
  int64_t lanes;
  int64_t lane_rows;          // staged rows that a lane has room for, from all sources together
  int64_t spare_experts = 0;  // slots of one rank for copies of experts

  int64_t num_domains() const { return world_size / ep_size; }
  int64_t experts_per_rank() const { return num_experts / ep_size; }
  // Experts and slots for copies of the EP group: the most experts that a plan can have.
  int64_t physical_experts() const { return num_experts + ep_size * spare_experts; }
};

// Rounds up to a multiple of 2, because f32 partial sums of half the tokens must fit the memory of
// 2-byte rows of all tokens.
constexpr int64_t EvenTokens(int64_t tokens) { return AlignUp(tokens, 2); }

// Returns the number of columns of a packed call's recv_count, which also has the counts of all
// pairs of ranks.
constexpr int64_t PackedColumns(int64_t ranks) { return 4 + 2 * ranks; }

// How the staged rows of a call are placed in a lane.
// - Apart: each source has room for all its tokens. On GPUs a rank has no room for its own rows,
//   because they do not travel.
// - Packed, if the lane has less room: each source's rows follow the previous source's rows. The
//   plan has the counts of all ranks.
struct LaneRoom {
  int32_t ranks;
  int32_t rows;   // rows of the widest type
  int64_t bytes;  // bytes of all rows

  // Whether calls with `tokens` tokens per rank are packed.
  constexpr bool Packs(int64_t tokens) const { return (ranks - 1) * EvenTokens(tokens) > rows; }
  // Returns the largest number of parts in which a rank receives `tokens` tokens from each other
  // rank. Each source's share of a part is rounded.
  constexpr int64_t MostParts(int64_t tokens) const {
    const int64_t each = rows - (ranks - 1);
    return Packs(tokens) ? ((ranks - 1) * tokens + each - 1) / each : 1;
  }
  // Returns the number of columns of the plan's recv_count.
  constexpr int64_t CountColumns(int64_t tokens) const {
    return Packs(tokens) ? PackedColumns(ranks) : 4;
  }
};

// Offsets in one lane. Each source writes only its own part of each region.
struct LaneLayout {
  LaneRoom room;
  int64_t source_rows_bytes;  // room of each source if rows are apart
  int64_t source_entries_bytes;
  int64_t source_counts_bytes;
  int64_t entries_offset;
  int64_t counts_offset;
  int64_t lane_bytes;

  explicit LaneLayout(const GroupSizes& sizes) {
    const int64_t tokens = sizes.max_tokens_per_rank;
    const int64_t row_bytes = sizes.hidden_size * sizes.max_token_bytes;
    source_rows_bytes = EvenTokens(tokens) * row_bytes;
    source_entries_bytes = AlignUp(tokens * sizes.max_top_k * 8, kLineBytes);
    source_counts_bytes = AlignUp((sizes.physical_experts() + 2 * sizes.ep_size) * 4, kLineBytes);
    entries_offset = AlignUp(sizes.lane_rows * row_bytes, kLineBytes);
    room = {static_cast<int32_t>(sizes.ep_size), static_cast<int32_t>(sizes.lane_rows),
            entries_offset};
    counts_offset = entries_offset + sizes.ep_size * source_entries_bytes;
    lane_bytes = AlignUp(counts_offset + sizes.ep_size * source_counts_bytes, kPageBytes);
  }
};

inline int64_t WindowBytes(const GroupSizes& sizes) {
  return sizes.lanes * LaneLayout(sizes).lane_bytes;
}

inline int64_t ControlBytes(int64_t ranks, int64_t lanes) {
  const int64_t head = sizeof(Control) + lanes * sizeof(Lane) + lanes * ranks * sizeof(PhaseWord);
  return AlignUp(head + kMeetingSlots * (4 + SlotBytes(ranks)), kPageBytes);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_LAYOUT_H_
