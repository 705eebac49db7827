#include "cpu/dispatch_kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

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
  for (int64_t s = offsets.staged[source]; s < offsets.staged[source + 1]; ++s) {
    for (int64_t i = plan.staged_start[s]; i < plan.staged_start[s + 1]; ++i) {
      const int64_t to = plan.staged_row[i];
      std::memcpy(recv + to * params.row_bytes, row, params.row_bytes);
      params.recv_weights[to] = params.weights != nullptr ? *weight++ : 1.0f;
    }
    row += params.row_bytes;
  }
}

// Writes the rows of this rank's tokens into the slabs of the ranks of this process.
void PushRows(const DispatchParams& params, const std::vector<const DispatchParams*>& peers) {
  const Plan& plan = params.plan;
  const auto* token = static_cast<const uint8_t*>(params.tokens);
  int64_t i = 0;
  for (int64_t t = 0; t < params.sizes.tokens; ++t, token += params.row_bytes) {
    for (int64_t k = 0; k < params.sizes.top_k; ++k, ++i) {
      if (plan.dst_rank[i] < 0 || peers[plan.dst_rank[i]] == nullptr) continue;
      const DispatchParams& peer = *peers[plan.dst_rank[i]];
      const int64_t to = plan.dst_row[i];
      std::memcpy(static_cast<uint8_t*>(peer.recv) + to * params.row_bytes, token,
                  params.row_bytes);
      peer.recv_weights[to] = params.weights != nullptr ? params.weights[i] : 1.0f;
    }
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

void PlaceGrad(const CombineBwdParams& params, const RowOps& ops, int64_t to, const uint8_t* grad,
               void* scratch) {
  uint8_t* out_row = static_cast<uint8_t*>(params.d_expert_out) + to * params.row_bytes;
  if (params.weights != nullptr) {
    ops.scale[params.type](out_row, grad, params.weights[to], params.sizes.width);
  } else {
    std::memcpy(out_row, grad, params.row_bytes);
  }
  if (params.expert_out == nullptr) return;
  const auto* expert_out = static_cast<const uint8_t*>(params.expert_out);
  params.d_weights[to] =
      ops.dot[params.type](grad, expert_out + to * params.row_bytes, scratch, params.sizes.width);
}

void PlaceGrads(const Call& call, const CombineBwdParams& params, const SourceOffsets& offsets,
                int64_t source, void* scratch) {
  const Plan& plan = params.plan;
  const RowOps& ops = GetRowOps();
  const uint8_t* grad = call.Rows(call.ep_rank(), source);
  for (int64_t s = offsets.staged[source]; s < offsets.staged[source + 1]; ++s) {
    for (int64_t i = plan.staged_start[s]; i < plan.staged_start[s + 1]; ++i) {
      PlaceGrad(params, ops, plan.staged_row[i], grad, scratch);
    }
    grad += params.row_bytes;
  }
}

void PushGrads(const CombineBwdParams& params, const std::vector<const CombineBwdParams*>& peers,
               void* scratch) {
  const Plan& plan = params.plan;
  const RowOps& ops = GetRowOps();
  const auto* grad = static_cast<const uint8_t*>(params.grad);
  int64_t i = 0;
  for (int64_t t = 0; t < params.sizes.tokens; ++t, grad += params.row_bytes) {
    for (int64_t k = 0; k < params.sizes.top_k; ++k, ++i) {
      if (plan.dst_rank[i] < 0 || peers[plan.dst_rank[i]] == nullptr) continue;
      PlaceGrad(*peers[plan.dst_rank[i]], ops, plan.dst_row[i], grad, scratch);
    }
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

}  // namespace

Status RunDispatch(Call& call, const DispatchParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  const std::vector<const DispatchParams*> peers = call.Peers<DispatchParams>();
  EP_RETURN_IF_ERROR(CheckPeers(call, params, peers));
  std::vector<int64_t> pending = call.Remote();
  SendRows(call, params.sizes, params.plan, params.tokens, params.row_bytes, params.weights);
  if (!pending.empty()) call.Signal(kRowsWritten);
  PushRows(params, peers);
  FillEmptyRows(call, params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  while (!pending.empty()) {
    int64_t source;
    EP_RETURN_IF_ERROR(call.NextReady(&pending, kRowsWritten, &source));
    PlaceRows(call, params, offsets, source);
  }
  call.CountRows(offsets.entries.back(), 0);
  return Status();
}

Status RunCombineBwd(Call& call, const CombineBwdParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  const std::vector<const CombineBwdParams*> peers = call.Peers<CombineBwdParams>();
  EP_RETURN_IF_ERROR(CheckPeers(call, params, peers));
  std::vector<int64_t> pending = call.Remote();
  SendRows(call, params.sizes, params.plan, params.grad, params.row_bytes, /*weights=*/nullptr);
  if (!pending.empty()) call.Signal(kRowsWritten);
  std::vector<double> scratch((params.sizes.width + 1) / 2);
  PushGrads(params, peers, scratch.data());
  ZeroEmptyGrads(params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  while (!pending.empty()) {
    int64_t source;
    EP_RETURN_IF_ERROR(call.NextReady(&pending, kRowsWritten, &source));
    PlaceGrads(call, params, offsets, source, scratch.data());
  }
  return Status();
}

}  // namespace ep_runtime
