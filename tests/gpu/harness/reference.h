// Expected results of the kernels, for all ranks at once, in plain loops. Sums are as in csrc/cpu:
// fp32, in slot order, then ranks in order, with every product rounded.
#ifndef EP_RUNTIME_TESTS_GPU_REFERENCE_H_
#define EP_RUNTIME_TESTS_GPU_REFERENCE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/groups/combine_precision.h"
#include "core/memory/layout.h"
#include "core/memory/plan.h"
#include "cuda/device/device_group.h"

namespace gpu_test {

using ep_runtime::CombinePrecision;
using ep_runtime::cuda::RowType;
using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

struct Case {
  const char* name;
  int ranks, tokens, width, top_k, experts, alignment, capacity;
  RowType type;
  int routing;  // 0 random distinct, 1 with repeats and unused, 2 all to one expert, 3 nothing to
                // rank 1, 4 skewed
  bool weighted;
  CombinePrecision precision = CombinePrecision::kFast;
  bool wide = false;            // combine's result is f32 with 16-bit rows
  int given_row_alignment = 0;  // 0: equal to `alignment`
  int spare = 0;                // slots of a rank for copies of experts
  int given_most_kept = 0;      // with slots: rows that a rank keeps before they are spread

  int local() const { return experts / ranks; }
  int physical() const { return local() + spare; }
  int most_kept() const { return spare == 0 ? capacity : given_most_kept; }
  int row_alignment() const { return given_row_alignment == 0 ? alignment : given_row_alignment; }
};

inline int ElementBytes(RowType type) {
  return type == RowType::kF32 ? 4 : type == RowType::kBytes ? 1 : 2;
}

// Like `lane_rows` of ep_runtime/device_layout.py, but smaller with few slots, so that few ranks
// already pack their rows.
inline int64_t LaneRows(int64_t ranks, int64_t tokens, int64_t top_k) {
  const int64_t even = ep_runtime::EvenTokens(tokens);
  const int64_t packed = std::max(std::max<int64_t>(top_k, 2) * even, 4 * ranks);
  return std::min((ranks - 1) * even, packed);
}

// A group of one domain, with two lanes.
inline ep_runtime::GroupSizes GroupOf(int ranks, int experts, int width, int tokens, int capacity,
                                      int top_k, int bytes) {
  return {ranks,    ranks, experts, width, tokens,
          capacity, top_k, bytes,   2,     LaneRows(ranks, tokens, top_k)};
}
inline ep_runtime::GroupSizes SizesOf(const Case& c) {
  auto sizes =
      GroupOf(c.ranks, c.experts, c.width, c.tokens, c.capacity, c.top_k, ElementBytes(c.type));
  sizes.spare_experts = c.spare;
  return sizes;
}
inline int CountColumns(const Case& c) {
  return static_cast<int>(ep_runtime::LaneLayout(SizesOf(c)).room.CountColumns(c.tokens));
}

// Type of combine's result.
inline RowType SumType(const Case& c) { return c.wide ? RowType::kF32 : c.type; }

inline float Widen(RowType type, const uint8_t* p) {
  if (type == RowType::kF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  if (type == RowType::kBF16) {
    __nv_bfloat16 x;
    std::memcpy(&x, p, 2);
    return __bfloat162float(x);
  }
  __half x;
  std::memcpy(&x, p, 2);
  return __half2float(x);
}

inline void Narrow(RowType type, float x, uint8_t* p) {
  if (type == RowType::kF32) {
    std::memcpy(p, &x, 4);
  } else if (type == RowType::kBF16) {
    const __nv_bfloat16 y = __float2bfloat16_rn(x);
    std::memcpy(p, &y, 2);
  } else {
    const __half y = __float2half_rn(x);
    std::memcpy(p, &y, 2);
  }
}

inline float Rounded(RowType type, float x) {
  uint8_t bytes[4];
  Narrow(type, x, bytes);
  return Widen(type, bytes);
}

// The nine arrays of one rank.
struct RankPlan {
  Ints dst_rank, dst_row, recv_count, staged_start, staged_row, staged_slot, kept, group_sizes,
      num_recv;
};

struct Row {
  int source = -1;
  int token = 0;
  int slot = 0;
};

struct Routed {
  std::vector<RankPlan> plans;
  Ints slots;                          // [N, S] expert of each slot for copies, -1: none
  std::vector<std::vector<Row>> rows;  // [N][C] owner of each row
  std::vector<int> zones;              // [N] end of the last zone
};

// Adds what packed calls have: staged rows of every source for every rank, then of the first half.
inline void AddPairCounts(const Case& c, Routed* routed) {
  const int columns = CountColumns(c);
  for (int r = 0; r < c.ranks; ++r) {
    for (int source = 0; source < c.ranks; ++source) {
      int32_t* row = &routed->plans[r].recv_count[source * columns];
      for (int dest = 0; dest < c.ranks; ++dest) {
        const int32_t* count = &routed->plans[dest].recv_count[source * columns];
        row[4 + dest] = count[0];
        row[4 + c.ranks + dest] = count[2];
      }
    }
  }
}

// An expert, or a slot for copies, and rows of it.
struct Piece {
  int expert = -1;
  int64_t rows = 0;
};

// Sorts pieces with most rows first, and otherwise keeps their order.
inline void Sort(std::vector<Piece>* pieces) {
  std::stable_sort(pieces->begin(), pieces->end(),
                   [](const Piece& a, const Piece& b) { return a.rows > b.rows; });
}

// Spreads the rows that experts keep over slots of other ranks: returns slots [N, S].
inline std::vector<Piece> Spread(const Case& c, const std::vector<int64_t>& kept) {
  struct Grant {
    int taker, giver;
    int64_t rows;
  };
  std::vector<Piece> givers, takers;  // ranks
  std::vector<int64_t> load(c.ranks, 0), left(c.ranks, 0);
  for (int e = 0; e < c.experts; ++e) load[e / c.local()] += kept[e];
  int64_t total = 0;
  for (const int64_t rows : load) total += rows;
  const int64_t even = (total + c.ranks - 1) / c.ranks;
  total = 0;
  for (int r = 0; r < c.ranks; ++r) {
    left[r] = load[r] - even;
    if (load[r] > even + even * 3 / 100) {
      givers.push_back({r, left[r]});
      total += left[r];
    } else if (left[r] < 0) {
      takers.push_back({r, -left[r]});
    }
  }
  Sort(&givers);
  Sort(&takers);
  std::vector<Grant> grants;
  size_t at = 0;
  for (const Piece& taker : takers) {
    const int64_t rows = std::min(taker.rows, total);
    if (rows == 0) break;
    grants.push_back({taker.expert, givers[at].expert, rows});
    left[givers[at].expert] -= rows;
    total -= rows;
    // A giver that gave too much takes from the next one.
    for (; left[givers[at].expert] <= 0 && at + 1 < givers.size(); ++at) {
      const int64_t missing = -left[givers[at].expert];
      if (missing == 0) continue;
      grants.push_back({givers[at].expert, givers[at + 1].expert, missing});
      left[givers[at + 1].expert] -= missing;
    }
  }
  std::vector<Piece> slots(c.ranks * c.spare);
  std::vector<bool> is_short(c.ranks, false);
  for (const Piece& giver : givers) {
    std::vector<Piece> pile;
    for (int e = giver.expert * c.local(); e < (giver.expert + 1) * c.local(); ++e) {
      pile.push_back({e, kept[e]});
    }
    Sort(&pile);
    size_t top = 0;
    for (const Grant& grant : grants) {
      if (grant.giver != giver.expert) continue;
      std::vector<Piece> found;
      for (int64_t wanted = grant.rows; wanted > 0;) {
        const int64_t rows = std::min(pile[top].rows, wanted);
        found.push_back({pile[top].expert, rows});
        wanted -= rows;
        pile[top].rows -= rows;
        if (pile[top].rows == 0) ++top;
      }
      Sort(&found);
      found.resize(std::min<size_t>(found.size(), c.spare));
      if (is_short[grant.taker]) found.clear();
      int64_t given = 0;
      for (size_t slot = 0; slot < found.size(); ++slot) {
        slots[grant.taker * c.spare + slot] = found[slot];
        given += found[slot].rows;
      }
      if (given < grant.rows) is_short[giver.expert] = true;
    }
  }
  return slots;
}

// The physical experts, a rank's own ones followed by its slots, with the rows that each gets.
struct Physical {
  std::vector<int64_t> rows, base;
  std::vector<std::vector<int>> of_expert;  // [E] in the order in which they get its rows
};

inline Physical SpreadOut(const Case& c, const std::vector<int64_t>& kept, Ints* experts) {
  Physical out;
  out.rows.resize(c.ranks * c.physical());
  out.of_expert.resize(c.experts);
  for (int e = 0; e < c.experts; ++e) {
    out.of_expert[e] = {e / c.local() * c.physical() + e % c.local()};
    out.rows[out.of_expert[e][0]] = kept[e];
  }
  const std::vector<Piece> slots = Spread(c, kept);
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    experts->push_back(slots[slot].expert);
    if (slots[slot].expert < 0) continue;
    std::vector<int>& places = out.of_expert[slots[slot].expert];
    const int rank = static_cast<int>(slot) / c.spare;
    places.push_back(rank * c.physical() + c.local() + static_cast<int>(slot) % c.spare);
    out.rows[places.back()] = slots[slot].rows;
    out.rows[places[0]] -= slots[slot].rows;
  }
  int64_t base = 0;
  for (size_t p = 0; p < out.rows.size(); ++p) {
    if (p % c.physical() == 0) base = 0;
    out.base.push_back(base);
    base += ep_runtime::AlignUp(out.rows[p], c.row_alignment());
  }
  return out;
}

inline Routed Route(const Case& c, const std::vector<Ints>& idx) {
  const int local = c.local();
  Ints counts(c.ranks * c.experts, 0);
  for (int r = 0; r < c.ranks; ++r) {
    for (int e : idx[r]) {
      if (e >= 0 && e < c.experts) ++counts[r * c.experts + e];
    }
  }
  const auto layout = ep_runtime::LayOutRows(counts.data(), c.experts, c.ranks, c.experts, local,
                                             c.most_kept(), {c.alignment, c.row_alignment()});
  Routed out;
  const Physical physical = SpreadOut(c, layout.kept, &out.slots);
  out.plans.resize(c.ranks);
  out.rows.assign(c.ranks, std::vector<Row>(c.capacity));
  out.zones.assign(c.ranks, 0);
  std::vector<int64_t> next(c.experts, 0);
  for (int r = 0; r < c.ranks; ++r) {
    RankPlan& plan = out.plans[r];
    plan.dst_rank.assign(c.tokens * c.top_k, -1);
    plan.dst_row.assign(c.tokens * c.top_k, -1);
    for (int i = 0; i < c.tokens * c.top_k; ++i) {
      const int e = idx[r][i];
      if (e < 0 || e >= c.experts) continue;
      int64_t position = next[e]++;
      if (position >= layout.kept[e]) continue;
      size_t which = 0;
      while (position >= physical.rows[physical.of_expert[e][which]]) {
        position -= physical.rows[physical.of_expert[e][which++]];
      }
      const int p = physical.of_expert[e][which];
      plan.dst_rank[i] = p / c.physical();
      plan.dst_row[i] = static_cast<int32_t>(physical.base[p] + position);
      out.rows[plan.dst_rank[i]][plan.dst_row[i]] = {r, i / c.top_k, i % c.top_k};
    }
  }
  for (int r = 0; r < c.ranks; ++r) {
    RankPlan& plan = out.plans[r];
    const int columns = CountColumns(c);
    plan.recv_count.assign(c.ranks * columns, 0);
    plan.staged_row.assign(c.capacity, -1);
    plan.staged_slot.assign(c.capacity, -1);
    int entries = 0;
    for (int source = 0; source < c.ranks; ++source) {
      const RankPlan& from = out.plans[source];
      int32_t* count = &plan.recv_count[source * columns];
      for (int t = 0; t < c.tokens; ++t) {
        bool first = true;
        for (int k = 0; k < c.top_k; ++k) {
          if (from.dst_rank[t * c.top_k + k] != r) continue;
          if (first) {
            plan.staged_start.push_back(entries);
            ++count[0];
            count[2] += t < (c.tokens + 1) / 2;
          }
          first = false;
          plan.staged_row[entries] = from.dst_row[t * c.top_k + k];
          plan.staged_slot[entries++] = k;
          ++count[1];
        }
      }
    }
    plan.staged_start.resize(c.ranks * c.tokens + 1, entries);
    int64_t demand = 0;
    for (int e = r * local; e < (r + 1) * local; ++e) {
      demand += ep_runtime::AlignUp(layout.demand[e], c.alignment);
    }
    for (int p = r * c.physical(); p < (r + 1) * c.physical(); ++p) {
      plan.kept.push_back(static_cast<int32_t>(physical.rows[p]));
      const auto zone = ep_runtime::AlignUp(physical.rows[p], c.row_alignment());
      plan.group_sizes.push_back(static_cast<int32_t>(zone));
      out.zones[r] += static_cast<int>(zone);
    }
    plan.num_recv = {static_cast<int32_t>(demand)};
  }
  if (CountColumns(c) > 4) AddPairCounts(c, &out);
  return out;
}

// Rounds through e4m3 with a scale for each kFp8Block values.
inline void RoundToFp8(Floats* values) {
  constexpr float kSmallest = 1.17549435e-38f;
  const int width = static_cast<int>(values->size());
  for (int start = 0; start < width; start += ep_runtime::kFp8Block) {
    float* x = values->data() + start;
    const int count = std::min(width - start, ep_runtime::kFp8Block);
    float amax = 0;
    for (int i = 0; i < count; ++i) {
      if (std::isfinite(x[i])) amax = std::max(amax, std::fabs(x[i]));
    }
    const float scale = amax < kSmallest ? 1.0f : std::max(amax / 448.0f, kSmallest);
    const float inverse = 1.0f / scale;
    for (int i = 0; i < count; ++i) {
      const float y = std::isfinite(x[i]) ? x[i] * inverse : NAN;
      const __half_raw half =
          __nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
      x[i] = __half2float(__half(half)) * scale;
    }
  }
}

// Rounds one rank's sum of a token's rows as it travels.
inline void RoundAsSent(const Case& c, Floats* part) {
  if (c.precision == CombinePrecision::kFp8) RoundToFp8(part);
  if (c.precision != CombinePrecision::kFast) return;
  for (float& x : *part) x = Rounded(c.type, x);
}

// Result of every rank's combine of `rows` [N][C, H].
inline Bytes Combine(const Case& c, const Routed& routed, const std::vector<Bytes>& rows,
                     const std::vector<Floats>* weights, int rank) {
  const int size = ElementBytes(c.type);
  const RankPlan& plan = routed.plans[rank];
  const int sum_size = ElementBytes(SumType(c));
  Bytes out(static_cast<size_t>(c.tokens) * c.width * sum_size);
  Floats sum(c.width), part(c.width);
  for (int t = 0; t < c.tokens; ++t) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int r = 0; r < c.ranks; ++r) {
      std::fill(part.begin(), part.end(), 0.0f);
      bool any = false;
      for (int k = 0; k < c.top_k; ++k) {
        if (plan.dst_rank[t * c.top_k + k] != r) continue;
        any = true;
        const int64_t row = plan.dst_row[t * c.top_k + k];
        const float w = weights != nullptr ? (*weights)[r][row] : 1.0f;
        for (int h = 0; h < c.width; ++h) {
          const float x = Widen(c.type, &rows[r][(row * c.width + h) * size]);
          volatile float product = weights != nullptr ? w * x : x;
          part[h] += product;
        }
      }
      if (!any) continue;
      RoundAsSent(c, &part);
      for (int h = 0; h < c.width; ++h) sum[h] += part[h];
    }
    for (int h = 0; h < c.width; ++h) {
      Narrow(SumType(c), sum[h], &out[(static_cast<size_t>(t) * c.width + h) * sum_size]);
    }
  }
  return out;
}

inline float HalvingDot(const Case& c, const uint8_t* a, const uint8_t* b) {
  const int size = ElementBytes(c.type);
  Floats sum(c.width);
  for (int h = 0; h < c.width; ++h) {
    volatile float product = Widen(c.type, a + h * size) * Widen(c.type, b + h * size);
    sum[h] = product;
  }
  for (int width = c.width; width > 1;) {
    const int half = (width + 1) / 2;
    for (int i = 0; i < width - half; ++i) sum[i] += sum[half + i];
    width = half;
  }
  return sum[0];
}

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_REFERENCE_H_
