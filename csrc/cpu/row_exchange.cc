// Copies rows between ranks, for dispatch and combine on CPU.
#include "cpu/row_exchange.h"

#include <string>

#include "cpu/row_ops.h"

namespace ep_runtime {
namespace {

// If a machine's ranks write more bytes than this in a call, rows are evicted from the caches
// before they are read.
constexpr int64_t kStreamBytes = 4 << 20;

Status BadPlan(const Call& call, const char* what) {
  return InvalidArgument("layer " + call.layer().name + ": the plan's " + what +
                         " is not what prepare made for these sizes")
      .With("argument", std::string("plan"));
}

Status CheckReceived(const Call& call, const Sizes& sizes, const Plan& plan) {
  int64_t staged = 0;
  int64_t entries = 0;
  for (int64_t source = 0; source < call.ep_size(); ++source) {
    const int32_t* counts = plan.recv_count + source * kRecvCountColumns;
    if (counts[kStaged] < 0 || counts[kStaged] > sizes.tokens || counts[kEntries] < 0 ||
        counts[kEntries] > sizes.tokens * sizes.top_k || counts[kStagedFirstHalf] < 0 ||
        counts[kStagedFirstHalf] > counts[kStaged]) {
      return BadPlan(call, "recv_count");
    }
    if (plan.staged_start[staged] != entries) return BadPlan(call, "staged_start");
    for (int64_t s = 0; s < counts[kStaged]; ++s) {
      if (plan.staged_start[staged + s + 1] <= plan.staged_start[staged + s]) {
        return BadPlan(call, "staged_start");
      }
    }
    staged += counts[kStaged];
    entries += counts[kEntries];
    if (entries > sizes.capacity || plan.staged_start[staged] != entries) {
      return BadPlan(call, "recv_count");
    }
  }
  for (int64_t i = 0; i < entries; ++i) {
    if (plan.staged_row[i] < 0 || plan.staged_row[i] >= sizes.capacity) {
      return BadPlan(call, "staged_row");
    }
  }
  return Status();
}

}  // namespace

Status CheckPlan(const Call& call, const Sizes& sizes, const Plan& plan) {
  for (int64_t i = 0; i < sizes.tokens * sizes.top_k; ++i) {
    if (plan.dst_rank[i] < -1 || plan.dst_rank[i] >= call.ep_size()) {
      return BadPlan(call, "dst_rank");
    }
  }
  int64_t zones = 0;
  for (int64_t e = 0; e < sizes.experts; ++e) {
    if (plan.kept[e] < 0 || plan.group_sizes[e] < plan.kept[e]) {
      return BadPlan(call, "group_sizes");
    }
    zones += plan.group_sizes[e];
  }
  if (zones > sizes.capacity) return BadPlan(call, "group_sizes");
  return CheckReceived(call, sizes, plan);
}

SourceOffsets::SourceOffsets(const Plan& plan, int64_t sources)
    : staged(sources + 1, 0), entries(sources + 1, 0) {
  for (int64_t source = 0; source < sources; ++source) {
    const int32_t* counts = plan.recv_count + source * kRecvCountColumns;
    staged[source + 1] = staged[source] + counts[kStaged];
    entries[source + 1] = entries[source] + counts[kEntries];
  }
}

RowCopy::RowCopy(int64_t row_bytes, int64_t call_bytes)
    : row_bytes_(row_bytes), stream_(call_bytes >= kStreamBytes ? GetRowOps().stream : nullptr) {}

RowCopy::~RowCopy() {
#if defined(__x86_64__)
  if (stream_ != nullptr) __builtin_ia32_sfence();
#endif
}

void SendRows(const Call& call, const Sizes& sizes, const Plan& plan, const void* rows,
              int64_t row_bytes, const float* weights) {
  const RowCopy copy(row_bytes, sizes.tokens * row_bytes);
  const auto* row = static_cast<const uint8_t*>(rows);
  std::vector<uint8_t*> next_row(call.ep_size());
  std::vector<float*> next_weight(call.ep_size());
  std::vector<int64_t> last_token(call.ep_size(), -1);
  for (int64_t dest = 0; dest < call.ep_size(); ++dest) {
    next_row[dest] = call.Rows(dest, call.ep_rank());
    next_weight[dest] = reinterpret_cast<float*>(call.Entries(dest, call.ep_rank()));
  }
  for (int64_t token = 0; token < sizes.tokens; ++token, row += row_bytes) {
    for (int64_t i = token * sizes.top_k; i < (token + 1) * sizes.top_k; ++i) {
      const int32_t dest = plan.dst_rank[i];
      if (dest < 0) continue;
      if (weights != nullptr) *next_weight[dest]++ = weights[i];
      if (last_token[dest] == token) continue;
      last_token[dest] = token;
      copy(next_row[dest], row);
      next_row[dest] += row_bytes;
    }
  }
}

}  // namespace ep_runtime
