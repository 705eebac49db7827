// Copies rows between ranks, for dispatch and combine on CPU.
#ifndef EP_RUNTIME_CPU_ROW_EXCHANGE_H_
#define EP_RUNTIME_CPU_ROW_EXCHANGE_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/groups/call.h"
#include "cpu/plan_view.h"

namespace ep_runtime {

// Checks the numbers of a plan before they are used as indices of writes, because a plan is an
// ordinary array that a program may have changed.
Status CheckPlan(const Call& call, const Sizes& sizes, const Plan& plan);

// Prefix sums [N + 1] over sources: how many staged rows and entries come from earlier sources.
struct SourceOffsets {
  std::vector<int64_t> staged;
  std::vector<int64_t> entries;
  SourceOffsets(const Plan& plan, int64_t sources);
};

// Copies rows. If a call moves more bytes than the caches keep until rows are read, copies bypass
// the caches.
class RowCopy {
 public:
  RowCopy(int64_t row_bytes, int64_t call_bytes);
  // Makes the copies visible to peers before this rank signals, because streaming stores are not
  // ordered before a later store.
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

// Sends each of the rows [T, row_bytes] once to every rank that keeps a row of it, and the weight
// of each entry if `weights` [T, K] is given.
void SendRows(const Call& call, const Sizes& sizes, const Plan& plan, const void* rows,
              int64_t row_bytes, const float* weights);

// Calls `padding(first_row, rows)` for the padding of every expert's zone, then `slack` once for
// the rows past the last zone.
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
