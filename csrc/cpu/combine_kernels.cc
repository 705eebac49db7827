// Kernels of combine on CPU.
#include "cpu/combine_kernels.h"

#include <algorithm>
#include <vector>

#include "cpu/fresh_memory.h"
#include "cpu/row_exchange.h"

namespace ep_runtime {
namespace {

// Phases of pass p: first ranks have written partial sums of the pass; then sources have read the
// sums.
constexpr uint32_t Written(int pass) { return static_cast<uint32_t>(2 * pass + 1); }
constexpr uint32_t Consumed(int pass) { return static_cast<uint32_t>(2 * pass + 2); }

int64_t PartialBytes(const CombineParams& params, CombinePrecision precision) {
  const int64_t width = params.sizes.width;
  if (precision == CombinePrecision::kFp8) return Fp8SumBytes(width);
  if (precision == CombinePrecision::kFast) return params.row_bytes;
  return width * (params.type == kF64 ? 8 : 4);
}

// Returns the function that sums a rank's rows into the format that is sent.
ReduceFn PartialSum(RowType type, CombinePrecision precision) {
  const RowOps& ops = GetRowOps();
  if (precision == CombinePrecision::kFp8) return ops.reduce_to_fp8[type];
  return (precision == CombinePrecision::kExact ? ops.reduce_to_wide : ops.reduce)[type];
}

// Returns the function that adds the partial sums that have arrived.
ReduceFn FinalSum(const CombineParams& params, CombinePrecision precision) {
  const RowOps& ops = GetRowOps();
  const bool wide = precision == CombinePrecision::kExact;
  if (precision == CombinePrecision::kFp8) {
    return ops.reduce_from_fp8[params.wide_tokens ? kF32 : params.type];
  }
  if (params.wide_tokens) return wide ? ops.reduce[kF32] : ops.reduce_to_wide[params.type];
  return (wide ? ops.reduce_from_wide : ops.reduce)[params.type];
}

struct Passes {
  CombinePrecision precision;
  int64_t partial_bytes;  // bytes of one partial sum
  int count;

  Passes(const Call& call, const CombineParams& params) {
    precision = call.group().options().combine_precision;
    partial_bytes = PartialBytes(params, precision);
    // The number of passes depends on static sizes only, so that it is the same on every rank.
    const int64_t lane_rows_bytes = call.group().lane_layout().source_rows_bytes;
    count = params.sizes.tokens * partial_bytes <= lane_rows_bytes ? 1 : 2;
  }
};

// Sums the rows of staged rows [first, last) of rank `dest`, and writes the sums to its lane.
void SendPartials(const Call& call, const CombineParams& params, const Passes& passes, int64_t dest,
                  int64_t first, int64_t last) {
  const Plan& plan = params.plan;
  const ReduceFn reduce = PartialSum(params.type, passes.precision);
  uint8_t* out = call.Rows(dest, call.ep_rank());
  const auto* rows = static_cast<const uint8_t*>(params.rows);
  std::vector<const void*> parts;
  std::vector<float> weights;
  for (int64_t s = first; s < last; ++s, out += passes.partial_bytes) {
    parts.clear();
    weights.clear();
    for (int64_t i = plan.staged_start[s]; i < plan.staged_start[s + 1]; ++i) {
      const int64_t row = plan.staged_row[i];
      parts.push_back(rows + row * params.row_bytes);
      if (params.weights != nullptr) weights.push_back(params.weights[row]);
    }
    reduce(out, parts.data(), params.weights != nullptr ? weights.data() : nullptr,
           static_cast<int64_t>(parts.size()), params.sizes.width);
  }
}

void SendWeightGrads(const Call& call, const CombineParams& params, const SourceOffsets& offsets,
                     int64_t dest) {
  auto* out = reinterpret_cast<float*>(call.Entries(dest, call.ep_rank()));
  for (int64_t i = offsets.entries[dest]; i < offsets.entries[dest + 1]; ++i) {
    *out++ = params.d_weights[params.plan.staged_row[i]];
  }
}

// Adds the partial sums of tokens [first, last) over ranks in order. `next` points to each rank's
// next partial sum of the pass.
void SumPartials(const Call& call, const CombineParams& params, const Passes& passes, int64_t first,
                 int64_t last) {
  const ReduceFn reduce = FinalSum(params, passes.precision);
  std::vector<const uint8_t*> next(call.ep_size());
  std::vector<uint8_t> used(call.ep_size());
  for (int64_t rank = 0; rank < call.ep_size(); ++rank) {
    next[rank] = call.Rows(call.ep_rank(), rank);
  }
  std::vector<const void*> parts;
  auto* out = static_cast<uint8_t*>(params.tokens) + first * params.token_bytes;
  for (int64_t token = first; token < last; ++token, out += params.token_bytes) {
    const int32_t* dst_rank = params.plan.dst_rank + token * params.sizes.top_k;
    std::fill(used.begin(), used.end(), 0);
    for (int64_t k = 0; k < params.sizes.top_k; ++k) {
      if (dst_rank[k] >= 0) used[dst_rank[k]] = 1;
    }
    parts.clear();
    for (int64_t rank = 0; rank < call.ep_size(); ++rank) {
      if (!used[rank]) continue;
      parts.push_back(next[rank]);
      next[rank] += passes.partial_bytes;
    }
    reduce(out, parts.data(), nullptr, static_cast<int64_t>(parts.size()), params.sizes.width);
  }
}

void ReadWeightGrads(const Call& call, const CombineParams& params) {
  std::vector<const float*> next(call.ep_size());
  for (int64_t rank = 0; rank < call.ep_size(); ++rank) {
    next[rank] = reinterpret_cast<const float*>(call.Entries(call.ep_rank(), rank));
  }
  for (int64_t i = 0; i < params.sizes.tokens * params.sizes.top_k; ++i) {
    const int32_t rank = params.plan.dst_rank[i];
    params.d_topk_weights[i] = rank < 0 ? 0.0f : *next[rank]++;
  }
}

}  // namespace

Status RunCombine(Call& call, const CombineParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  PreferHugePages(params.tokens, params.sizes.tokens * params.token_bytes);
  const Passes passes(call, params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  const int64_t tokens = params.sizes.tokens;
  const int64_t half = (tokens + 1) / 2;
  for (int pass = 0; pass < passes.count; ++pass) {
    const bool only = passes.count == 1;
    for (int64_t dest : call.Ring()) {
      if (pass > 0) EP_RETURN_IF_ERROR(call.Await(dest, Consumed(pass - 1)));
      const int64_t middle = offsets.staged[dest] +
                             params.plan.recv_count[dest * kRecvCountColumns + kStagedFirstHalf];
      SendPartials(call, params, passes, dest, pass == 0 ? offsets.staged[dest] : middle,
                   pass == 0 && !only ? middle : offsets.staged[dest + 1]);
      if (pass == 0 && params.d_weights != nullptr) SendWeightGrads(call, params, offsets, dest);
    }
    call.Signal(Written(pass));
    for (int64_t source : call.Ring()) EP_RETURN_IF_ERROR(call.Await(source, Written(pass)));
    SumPartials(call, params, passes, pass == 0 ? 0 : half, pass == 0 && !only ? half : tokens);
    if (pass == 0 && params.d_weights != nullptr) ReadWeightGrads(call, params);
    if (pass + 1 < passes.count) call.Signal(Consumed(pass));
  }
  return Status();
}

}  // namespace ep_runtime
