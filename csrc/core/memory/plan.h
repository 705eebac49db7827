// Integer arithmetic of routing: the same on every rank, from the same count matrix.
#ifndef EP_RUNTIME_CORE_MEMORY_PLAN_H_
#define EP_RUNTIME_CORE_MEMORY_PLAN_H_

#include <cstdint>
#include <vector>

namespace ep_runtime {

// Rows each local expert keeps of `demand`; the rule is `kept_rows` of ep_runtime/layout.py.
void KeptRows(const int64_t* demand, int64_t experts, int64_t capacity, int64_t alignment,
              int64_t* kept);

// What the whole count matrix says about every expert of the EP group.
struct RowLayout {
  std::vector<int64_t> demand;  // [E] rows asked, all sources
  std::vector<int64_t> kept;    // [E] rows kept
  std::vector<int64_t> base;    // [E] first row of the expert in its rank's slab
};

// To which multiples of rows zones of experts are rounded up.
struct Alignments {
  int64_t kept;  // as demand is held against the capacity
  int64_t rows;  // as they lie in a slab; it divides `kept`
};

// Fills `layout` from `counts`, one row of E per source: counts[source * stride + expert].
RowLayout LayOutRows(const int32_t* counts, int64_t stride, int64_t sources, int64_t num_experts,
                     int64_t experts_per_rank, int64_t capacity, const Alignments& alignments);

// One row that a source sends to a rank, in the order the rank learns them: token, then slot.
struct Entry {
  int32_t row;         // in the receiver's slab
  int32_t token_slot;  // token * K + slot
};
static_assert(sizeof(Entry) == 8, "the window keeps 8 bytes per slot");

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_PLAN_H_
