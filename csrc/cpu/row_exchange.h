#ifndef EP_RUNTIME_CPU_ROW_EXCHANGE_H_
#define EP_RUNTIME_CPU_ROW_EXCHANGE_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/groups/call.h"
#include "cpu/plan_view.h"

namespace ep_runtime {

// A plan is an ordinary array that a program may have changed: nothing is written by its numbers
// before this has looked at them.
Status CheckPlan(const Call& call, const Sizes& sizes, const Plan& plan);

// Staged rows and entries of all sources before each one: [N + 1] prefix sums.
struct SourceOffsets {
  std::vector<int64_t> staged;
  std::vector<int64_t> entries;
  SourceOffsets(const Plan& plan, int64_t sources);
};

// Copies rows, past the caches where a call moves so many bytes that they would not stay there
// until they are read.
class RowCopy {
 public:
  RowCopy(int64_t row_bytes, int64_t call_bytes);
  // Ends with the copies in sight of whoever is told of them next: streaming stores are not
  // ordered by the store that tells.
  ~RowCopy();
  RowCopy(const RowCopy&) = delete;
  RowCopy& operator=(const RowCopy&) = delete;

  void operator()(void* to, const void* from) const {
    if (stream_ != nullptr) {
      stream_(to, from, row_bytes_);
    } else {
      std::memcpy(to, from, row_bytes_);
    }
  }

 private:
  int64_t row_bytes_;
  void (*stream_)(void* to, const void* from, int64_t bytes);
};

// Sends rows [T, row_bytes] once to every rank that keeps a row of them and, where `weights`
// [T, K] is given, the weight of each entry.
void SendRows(const Call& call, const Sizes& sizes, const Plan& plan, const void* rows,
              int64_t row_bytes, const float* weights);

// Calls `fill(first_row, rows)` for the padding of every expert's zone, then once for the rows
// past the last zone; returns nothing else than where rows are not.
template <typename Padding, typename Slack>
void VisitEmptyRows(const Sizes& sizes, const Plan& plan, Padding padding, Slack slack) {
  int64_t base = 0;
  for (int64_t e = 0; e < sizes.experts; ++e) {
    padding(base + plan.kept[e], int64_t{plan.group_sizes[e]} - plan.kept[e]);
    base += plan.group_sizes[e];
  }
  slack(base, sizes.capacity - base);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_ROW_EXCHANGE_H_
