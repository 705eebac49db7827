// The types of a plan and of its sizes for the CPU's kernels.
#ifndef EP_RUNTIME_CPU_PLAN_VIEW_H_
#define EP_RUNTIME_CPU_PLAN_VIEW_H_

#include <cstdint>

#include "core/memory/plan_arrays.h"

namespace ep_runtime {

// Columns of recv_count.
enum : int64_t {
  kStaged = 0,
  kEntries = 1,
  kStagedFirstHalf = 2,
  kDropped = 3,
  kRecvCountColumns = 4
};

using Plan = PlanArrays<const int32_t>;
using MutablePlan = PlanArrays<int32_t>;

struct Sizes {
  int64_t tokens;    // T
  int64_t top_k;     // K
  int64_t capacity;  // C
  int64_t experts;   // L
  int64_t width;     // H
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_PLAN_VIEW_H_
