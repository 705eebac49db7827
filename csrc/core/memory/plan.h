// Computes which rows are kept, and where. Every rank computes the same from the same count matrix.
#ifndef EP_RUNTIME_CORE_MEMORY_PLAN_H_
#define EP_RUNTIME_CORE_MEMORY_PLAN_H_

#include <cstdint>
#include <vector>

namespace ep_runtime {

// Fills `kept` with the rows of `demand` that each local expert keeps, by the rule of `kept_rows`
// in ep_runtime/layout.py.
void KeptRows(const int64_t* demand, int64_t experts, int64_t capacity, int64_t alignment,
              int64_t* kept);

// Rows of every expert of the EP group, computed from the whole count matrix.
struct RowLayout {
  std::vector<int64_t> demand;  // [E] rows demanded by all sources
  std::vector<int64_t> kept;    // [E] rows kept
  std::vector<int64_t> base;    // [E] first row of the expert in its rank's slab
};

// Numbers of rows to whose multiples zones of experts are rounded up.
struct Alignments {
  int64_t kept;  // to compare demand with the capacity
  int64_t rows;  // for zones in a slab; divides `kept`
};

// Computes the layout from `counts`, which has a row of E counts per source: counts[source * stride
// + expert].
RowLayout LayOutRows(const int32_t* counts, int64_t stride, int64_t sources, int64_t num_experts,
                     int64_t experts_per_rank, int64_t capacity, const Alignments& alignments);

// One row that a source sends to a rank. The rank gets entries in order of token, then slot.
struct Entry {
  int32_t row;         // row in the receiver's slab
  int32_t token_slot;  // token * K + slot
};
static_assert(sizeof(Entry) == 8, "the window keeps 8 bytes per slot");

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_PLAN_H_
