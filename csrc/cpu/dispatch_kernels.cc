// Kernels of dispatch and combine's backward on CPU.
#include "cpu/dispatch_kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/fresh_memory.h"
#include "cpu/row_exchange.h"

namespace ep_runtime {
namespace {

enum : uint32_t { kRowsWritten = 1 };

void PlaceRows(const Call& call, const DispatchParams& params, const SourceOffsets& offsets,
               int64_t source) {
  const Plan& plan = params.plan;
  const uint8_t* row = call.Rows(call.ep_rank(), source);
  const auto* weight = reinterpret_cast<const float*>(call.Entries(call.ep_rank(), source));
  auto* recv = static_cast<uint8_t*>(params.recv);
  const RowCopy copy(params.row_bytes, offsets.entries.back() * params.row_bytes);
  for (int64_t s = offsets.staged[source]; s < offsets.staged[source + 1]; ++s) {
    for (int64_t i = plan.staged_start[s]; i < plan.staged_start[s + 1]; ++i) {
      const int64_t to = plan.staged_row[i];
      copy(recv + to * params.row_bytes, row);
      params.recv_weights[to] = params.weights != nullptr ? *weight++ : 1.0f;
    }
    row += params.row_bytes;
  }
}

void FillEmptyRows(const Call& call, const DispatchParams& params) {
  auto* recv = static_cast<uint8_t*>(params.recv);
  VisitEmptyRows(
      params.sizes, params.plan,
      [&](int64_t first, int64_t rows) {
        std::memset(recv + first * params.row_bytes, 0, rows * params.row_bytes);
        std::fill_n(params.recv_weights + first, rows, 0.0f);
      },
      [&](int64_t first, int64_t rows) {
        std::fill_n(params.recv_weights + first, rows, 0.0f);
        if (!call.group().options().debug) return;
        std::memset(recv + first * params.row_bytes, 0xFF, rows * params.row_bytes);
      });
}

void PlaceGrads(const Call& call, const CombineBwdParams& params, const SourceOffsets& offsets,
                int64_t source, void* scratch) {
  const Plan& plan = params.plan;
  const RowOps& ops = GetRowOps();
  const uint8_t* grad = call.Rows(call.ep_rank(), source);
  auto* out = static_cast<uint8_t*>(params.d_expert_out);
  const auto* expert_out = static_cast<const uint8_t*>(params.expert_out);
  for (int64_t s = offsets.staged[source]; s < offsets.staged[source + 1]; ++s) {
    for (int64_t i = plan.staged_start[s]; i < plan.staged_start[s + 1]; ++i) {
      const int64_t to = plan.staged_row[i];
      uint8_t* out_row = out + to * params.row_bytes;
      if (params.weights != nullptr) {
        ops.scale[params.type](out_row, grad, params.weights[to], params.sizes.width);
      } else {
        std::memcpy(out_row, grad, params.row_bytes);
      }
      if (expert_out == nullptr) continue;
      params.d_weights[to] = ops.dot[params.type](grad, expert_out + to * params.row_bytes, scratch,
                                                  params.sizes.width);
    }
    grad += params.row_bytes;
  }
}

void ZeroEmptyGrads(const CombineBwdParams& params) {
  auto* out = static_cast<uint8_t*>(params.d_expert_out);
  const auto zero = [&](int64_t first, int64_t rows) {
    std::memset(out + first * params.row_bytes, 0, rows * params.row_bytes);
    if (params.d_weights != nullptr) std::fill_n(params.d_weights + first, rows, 0.0f);
  };
  VisitEmptyRows(params.sizes, params.plan, zero, zero);
}

// Populates the pages of a slab that will be written, while peers push their rows. One system call
// replaces a page fault for every page.
void BringInSlab(void* rows, const Sizes& sizes, const Plan& plan, int64_t row_bytes) {
  int64_t used = 0;
  for (int64_t e = 0; e < sizes.experts; ++e) used += plan.group_sizes[e];
  BringIn(rows, used * row_bytes);
}

}  // namespace

Status RunDispatch(Call& call, const DispatchParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  PreferHugePages(params.recv, params.sizes.capacity * params.row_bytes);
  SendRows(call, params.sizes, params.plan, params.tokens, params.row_bytes, params.weights);
  call.Signal(kRowsWritten);
  BringInSlab(params.recv, params.sizes, params.plan, params.row_bytes);
  FillEmptyRows(call, params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  std::vector<int64_t> pending = call.Ring();
  while (!pending.empty()) {
    int64_t source;
    EP_RETURN_IF_ERROR(call.NextReady(&pending, kRowsWritten, &source));
    PlaceRows(call, params, offsets, source);
  }
  call.CountRows(offsets.entries.back(), std::max(params.plan.recv_count[kDropped], 0));
  return Status();
}

Status RunCombineBwd(Call& call, const CombineBwdParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  PreferHugePages(params.d_expert_out, params.sizes.capacity * params.row_bytes);
  SendRows(call, params.sizes, params.plan, params.grad, params.row_bytes, /*weights=*/nullptr);
  call.Signal(kRowsWritten);
  ZeroEmptyGrads(params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  std::vector<double> scratch((params.sizes.width + 1) / 2);
  std::vector<int64_t> pending = call.Ring();
  while (!pending.empty()) {
    int64_t source;
    EP_RETURN_IF_ERROR(call.NextReady(&pending, kRowsWritten, &source));
    PlaceGrads(call, params, offsets, source, scratch.data());
  }
  return Status();
}

}  // namespace ep_runtime
