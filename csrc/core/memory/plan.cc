// Computes which rows are kept, and where.
#include "core/memory/plan.h"

#include <algorithm>

#include "core/memory/layout.h"

namespace ep_runtime {
namespace {

int64_t Zones(const int64_t* demand, int64_t experts, int64_t level, int64_t alignment) {
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; ++e) rows += AlignUp(std::min(demand[e], level), alignment);
  return rows;
}

}  // namespace

void KeptRows(const int64_t* demand, int64_t experts, int64_t capacity, int64_t alignment,
              int64_t* kept) {
  const int64_t most = experts > 0 ? *std::max_element(demand, demand + experts) : 0;
  if (Zones(demand, experts, most, alignment) <= capacity) {
    std::copy(demand, demand + experts, kept);
    return;
  }
  // Zones grow by whole blocks of `alignment` rows, so the largest level that fits is a multiple of
  // a block.
  int64_t low = 0;
  int64_t high = most / alignment + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (Zones(demand, experts, middle * alignment, alignment) <= capacity ? low : high) = middle;
  }
  const int64_t level = low * alignment;
  int64_t left = capacity - Zones(demand, experts, level, alignment);
  for (int64_t e = 0; e < experts; ++e) {
    const bool extra = demand[e] > level && left >= alignment;
    if (extra) left -= alignment;
    kept[e] = std::min(demand[e], level + (extra ? alignment : 0));
  }
}

RowLayout LayOutRows(const int32_t* counts, int64_t stride, int64_t sources, int64_t num_experts,
                     int64_t experts_per_rank, int64_t capacity, const Alignments& alignments) {
  RowLayout layout;
  layout.demand.assign(num_experts, 0);
  layout.kept.assign(num_experts, 0);
  layout.base.assign(num_experts, 0);
  for (int64_t source = 0; source < sources; ++source) {
    for (int64_t e = 0; e < num_experts; ++e) layout.demand[e] += counts[source * stride + e];
  }
  for (int64_t first = 0; first < num_experts; first += experts_per_rank) {
    KeptRows(&layout.demand[first], experts_per_rank, capacity, alignments.kept,
             &layout.kept[first]);
    int64_t base = 0;
    for (int64_t e = first; e < first + experts_per_rank; ++e) {
      layout.base[e] = base;
      base += AlignUp(layout.kept[e], alignments.rows);
    }
  }
  return layout;
}

}  // namespace ep_runtime
