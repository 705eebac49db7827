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
  return GroupOf(c.ranks, c.experts, c.width, c.tokens, c.capacity, c.top_k, ElementBytes(c.type));
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

inline Routed Route(const Case& c, const std::vector<Ints>& idx) {
  const int local = c.experts / c.ranks;
  Ints counts(c.ranks * c.experts, 0);
  for (int r = 0; r < c.ranks; ++r) {
    for (int e : idx[r]) {
      if (e >= 0 && e < c.experts) ++counts[r * c.experts + e];
    }
  }
  const auto layout = ep_runtime::LayOutRows(counts.data(), c.experts, c.ranks, c.experts, local,
                                             c.capacity, {c.alignment, c.row_alignment()});
  Routed out;
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
      const int64_t position = next[e]++;
      if (position >= layout.kept[e]) continue;
      plan.dst_rank[i] = e / local;
      plan.dst_row[i] = static_cast<int32_t>(layout.base[e] + position);
      out.rows[e / local][plan.dst_row[i]] = {r, i / c.top_k, i % c.top_k};
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
      plan.kept.push_back(static_cast<int32_t>(layout.kept[e]));
      const auto zone = ep_runtime::AlignUp(layout.kept[e], c.row_alignment());
      plan.group_sizes.push_back(static_cast<int32_t>(zone));
      out.zones[r] += static_cast<int>(zone);
      demand += ep_runtime::AlignUp(layout.demand[e], c.alignment);
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
