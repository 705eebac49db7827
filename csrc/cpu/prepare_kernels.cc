// Kernels of prepare on CPU.
#include "cpu/prepare_kernels.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/memory/plan.h"

namespace ep_runtime {
namespace {

enum : uint32_t { kCountsWritten = 1, kEntriesWritten = 2 };

// Writes each slot's position among this source's slots of the same expert to `order` (-1 for
// unused slots), and returns the number of slots of each expert.
std::vector<int32_t> CountSlots(const PrepareParams& params, int64_t num_experts, int32_t* order) {
  std::vector<int32_t> counts(num_experts, 0);
  const int64_t slots = params.sizes.tokens * params.sizes.top_k;
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t expert = params.topk_idx[i];
    const bool used = expert >= 0 && expert < num_experts;
    order[i] = used ? counts[expert]++ : -1;
  }
  return counts;
}

Status CheckIndices(const PrepareParams& params, const Call& call) {
  const int64_t num_experts = params.sizes.experts * call.ep_size();
  const int64_t slots = params.sizes.tokens * params.sizes.top_k;
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t expert = params.topk_idx[i];
    if (expert >= -1 && expert < num_experts) continue;
    return InvalidArgument("layer " + call.layer().name + ": topk_idx must be in [-1, " +
                           std::to_string(num_experts) + "), got " + std::to_string(expert) +
                           " at token " + std::to_string(i / params.sizes.top_k) + " slot " +
                           std::to_string(i % params.sizes.top_k))
        .With("argument", std::string("topk_idx"));
  }
  return Status();
}

// Computes destinations from the orders, and sends each peer the entries of its rows.
void SendEntries(const PrepareParams& params, const Call& call, const RowLayout& layout,
                 const std::vector<int64_t>& before) {
  const int64_t experts = params.sizes.experts;
  std::vector<Entry*> cursor(call.ep_size());
  for (int64_t dest = 0; dest < call.ep_size(); ++dest) {
    cursor[dest] = reinterpret_cast<Entry*>(call.Entries(dest, call.ep_rank()));
  }
  const int64_t slots = params.sizes.tokens * params.sizes.top_k;
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t order = params.plan.dst_row[i];
    params.plan.dst_rank[i] = -1;
    if (order < 0) continue;
    const int32_t expert = params.topk_idx[i];
    const int64_t position = before[expert] + order;
    params.plan.dst_row[i] = -1;
    if (position >= layout.kept[expert]) continue;
    const auto dest = static_cast<int32_t>(expert / experts);
    const auto row = static_cast<int32_t>(layout.base[expert] + position);
    params.plan.dst_rank[i] = dest;
    params.plan.dst_row[i] = row;
    *cursor[dest]++ = {row, static_cast<int32_t>(i)};
  }
}

// Counts the rows of `source` that this rank keeps: the first kept[e] of each expert, sources in
// order.
int64_t CountEntries(const Call& call, const RowLayout& layout, int64_t experts,
                     std::vector<int64_t>* earlier, const int32_t* counts) {
  const int64_t first = call.ep_rank() * experts;
  int64_t entries = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t left = std::max<int64_t>(layout.kept[first + e] - (*earlier)[e], 0);
    entries += std::min<int64_t>(left, counts[first + e]);
    (*earlier)[e] += counts[first + e];
  }
  return entries;
}

class StagedWriter {
 public:
  explicit StagedWriter(const PrepareParams& params) : params_(params) {}

  void Add(int64_t source, const Entry* entries, int64_t count) {
    const MutablePlan& plan = params_.plan;
    const int64_t first_half = (params_.sizes.tokens + 1) / 2;
    int32_t* row_of = plan.recv_count + source * kRecvCountColumns;
    int64_t last_token = -1;
    int64_t staged = 0;
    int64_t staged_first_half = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = entries[i].token_slot / params_.sizes.top_k;
      if (token != last_token) {
        plan.staged_start[staged_++] = static_cast<int32_t>(entries_);
        ++staged;
        staged_first_half += token < first_half;
        last_token = token;
      }
      plan.staged_row[entries_] = entries[i].row;
      plan.staged_slot[entries_] =
          static_cast<int32_t>(entries[i].token_slot % params_.sizes.top_k);
      ++entries_;
    }
    row_of[kStaged] = static_cast<int32_t>(staged);
    row_of[kEntries] = static_cast<int32_t>(count);
    row_of[kStagedFirstHalf] = static_cast<int32_t>(staged_first_half);
    row_of[3] = 0;
  }

  void FillTails(int64_t sources) {
    const MutablePlan& plan = params_.plan;
    const int64_t staged_size = sources * params_.sizes.tokens + 1;
    std::fill(plan.staged_start + staged_, plan.staged_start + staged_size,
              static_cast<int32_t>(entries_));
    std::fill(plan.staged_row + entries_, plan.staged_row + params_.sizes.capacity, -1);
    std::fill(plan.staged_slot + entries_, plan.staged_slot + params_.sizes.capacity, -1);
  }

 private:
  const PrepareParams& params_;
  int64_t staged_ = 0;
  int64_t entries_ = 0;
};

void WriteSizes(const PrepareParams& params, Call& call, const RowLayout& layout) {
  const int64_t first = call.ep_rank() * params.sizes.experts;
  const Alignments alignments = call.alignments();
  int64_t demand = 0;
  int64_t dropped = 0;
  for (int64_t e = 0; e < params.sizes.experts; ++e) {
    const int64_t kept = layout.kept[first + e];
    params.plan.kept[e] = static_cast<int32_t>(kept);
    params.plan.group_sizes[e] = static_cast<int32_t>(AlignUp(kept, alignments.rows));
    demand += AlignUp(layout.demand[first + e], alignments.kept);
    dropped += layout.demand[first + e] - kept;
  }
  params.plan.num_recv[0] = static_cast<int32_t>(std::min<int64_t>(demand, INT32_MAX));
  call.CountRows(0, dropped);
  // With physical experts, an earlier prepare has counted the load.
  if (params.sizes.experts != call.group().sizes().experts_per_rank()) return;
  call.CountLoad(params.sizes.tokens, layout.kept.data() + first);
}

}  // namespace

Status RunPrepare(Call& call, const PrepareParams& params) {
  if (call.group().options().debug) EP_RETURN_IF_ERROR(CheckIndices(params, call));
  const int64_t num_experts = params.sizes.experts * call.ep_size();
  const int64_t me = call.ep_rank();
  const std::vector<int32_t> mine = CountSlots(params, num_experts, params.plan.dst_row);
  for (int64_t dest : call.Ring()) {
    std::memcpy(call.Counts(dest, me), mine.data(), mine.size() * sizeof(int32_t));
  }
  call.Signal(kCountsWritten);
  for (int64_t source : call.Ring()) EP_RETURN_IF_ERROR(call.Await(source, kCountsWritten));

  const int32_t* matrix = call.Counts(me, 0);
  const int64_t stride = call.group().lane_layout().source_counts_bytes / 4;
  const RowLayout layout =
      LayOutRows(matrix, stride, call.ep_size(), num_experts, params.sizes.experts,
                 params.sizes.capacity, call.alignments());
  std::vector<int64_t> before(num_experts, 0);
  for (int64_t source = 0; source < me; ++source) {
    for (int64_t e = 0; e < num_experts; ++e) before[e] += matrix[source * stride + e];
  }
  SendEntries(params, call, layout, before);
  call.Signal(kEntriesWritten);

  // Visit sources in order, because staged rows are numbered source by source.
  StagedWriter writer(params);
  std::vector<int64_t> earlier(params.sizes.experts, 0);
  for (int64_t source = 0; source < call.ep_size(); ++source) {
    EP_RETURN_IF_ERROR(call.Await(source, kEntriesWritten));
    const int64_t count =
        CountEntries(call, layout, params.sizes.experts, &earlier, matrix + source * stride);
    writer.Add(source, reinterpret_cast<const Entry*>(call.Entries(me, source)), count);
  }
  writer.FillTails(call.ep_size());
  WriteSizes(params, call, layout);
  return Status();
}

}  // namespace ep_runtime
