#include "cpu/combine_kernels.h"

#include <algorithm>
#include <vector>

#include "cpu/fresh_memory.h"
#include "cpu/row_exchange.h"

namespace ep_runtime {
namespace {

// Phases of pass p: partials of the pass written, then read by their source.
constexpr uint32_t Written(int pass) { return static_cast<uint32_t>(2 * pass + 1); }
constexpr uint32_t Consumed(int pass) { return static_cast<uint32_t>(2 * pass + 2); }

// Of each row of the next token; further on the processor has seen where it goes.
constexpr int64_t kPrefetchBytes = 1024;

// Smaller rows lie too far apart for their sources to gather them; the rank that has them walks
// them in order. Processor time measured: 1 KiB rows 1.2 times more in place, 4 KiB 1.2 times less.
constexpr int64_t kInPlaceBytes = 4096;

int64_t WideBytes(RowType type) { return type == kF64 ? 8 : 4; }

struct Passes {
  bool wide;
  int64_t partial_bytes;  // of one partial row
  int count;

  Passes(const Call& call, const CombineParams& params) {
    wide = call.group().options().exact_combine;
    partial_bytes = wide ? params.sizes.width * WideBytes(params.type) : params.row_bytes;
    // From static sizes alone, so that every rank makes the same number of passes.
    const int64_t lane_rows_bytes = call.group().lane_layout().source_rows_bytes;
    count = params.sizes.tokens * partial_bytes <= lane_rows_bytes ? 1 : 2;
  }
};

// How each peer is reached: its rows where they lie, or sums of them through windows.
struct Exchange {
  std::vector<const CombineParams*> in_place;  // [N] null for staged peers
  std::vector<int64_t> staged;

  Exchange(const Call& call, const CombineParams& params)
      : in_place(call.ep_size()), staged(call.Ring()) {
    if (!ReadsInPlace(params)) return;
    in_place = call.Peers<CombineParams>();
    staged = call.Remote();
  }
};

// Reduces the staged rows [first, last) of one source into its lane.
void SendPartials(const Call& call, const CombineParams& params, const Passes& passes, int64_t dest,
                  int64_t first, int64_t last) {
  const Plan& plan = params.plan;
  const RowOps& ops = GetRowOps();
  const ReduceFn reduce = passes.wide ? ops.reduce_to_wide[params.type] : ops.reduce[params.type];
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

// Sums this rank's tokens over ranks in order. Partials of other processes' ranks come out of the
// lane; those of this process's ranks are made here, from their rows in place.
class TokenSums {
 public:
  TokenSums(const Call& call, const CombineParams& params, const Passes& passes,
            const Exchange& exchange)
      : params_(params),
        peers_(exchange.in_place),
        partial_bytes_(passes.partial_bytes),
        widens_(passes.wide && (params.type == kBF16 || params.type == kF16)),
        reduce_rows_(passes.wide ? GetRowOps().reduce_to_wide[params.type]
                                 : GetRowOps().reduce[params.type]),
        reduce_partials_(passes.wide ? GetRowOps().reduce_from_wide[params.type]
                                     : GetRowOps().reduce[params.type]),
        in_place_(exchange.staged.size() < exchange.in_place.size()),
        next_(call.ep_size()),
        used_((call.ep_size() + 63) / 64),
        head_(call.ep_size(), -1),
        after_(params.sizes.top_k),
        scratch_(call.ep_size() * passes.partial_bytes) {
    for (int64_t rank : exchange.staged) next_[rank] = call.Rows(call.ep_rank(), rank);
  }

  void Sum(int64_t token) {
    if (in_place_) Prefetch(token + 1);
    const int64_t first = token * params_.sizes.top_k;
    LinkSlots(first);
    parts_.clear();
    for (size_t word = 0; word < used_.size(); ++word) {
      for (; used_[word] != 0; used_[word] &= used_[word] - 1) {
        const auto rank = static_cast<int32_t>(64 * word) + __builtin_ctzll(used_[word]);
        if (peers_[rank] != nullptr) {
          parts_.push_back(LocalPartial(rank, first));
        } else {
          parts_.push_back(next_[rank]);
          next_[rank] += partial_bytes_;
        }
        head_[rank] = -1;
      }
    }
    reduce_partials_(static_cast<uint8_t*>(params_.tokens) + token * params_.row_bytes,
                     parts_.data(), nullptr, static_cast<int64_t>(parts_.size()),
                     params_.sizes.width);
  }

 private:
  // Lists each rank's slots of a token in order, and marks the ranks that have any.
  void LinkSlots(int64_t first) {
    for (int64_t k = params_.sizes.top_k - 1; k >= 0; --k) {
      const int32_t rank = params_.plan.dst_rank[first + k];
      if (rank < 0) continue;
      after_[k] = head_[rank];
      head_[rank] = static_cast<int32_t>(k);
      used_[rank / 64] |= uint64_t{1} << (rank % 64);
    }
  }

  // Rows lie anywhere in their slabs: no processor guesses where the next ones start.
  void Prefetch(int64_t token) const {
    if (token >= params_.sizes.tokens) return;
    const int64_t bytes = std::min(params_.row_bytes, kPrefetchBytes);
    for (int64_t i = token * params_.sizes.top_k; i < (token + 1) * params_.sizes.top_k; ++i) {
      const int32_t rank = params_.plan.dst_rank[i];
      if (rank < 0 || peers_[rank] == nullptr) continue;
      const uint8_t* row = Row(*peers_[rank], params_.plan.dst_row[i]);
      for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + at);
    }
  }

  const uint8_t* Row(const CombineParams& peer, int64_t row) const {
    return static_cast<const uint8_t*>(peer.rows) + row * params_.row_bytes;
  }

  const void* LocalPartial(int32_t rank, int64_t first) {
    const CombineParams& peer = *peers_[rank];
    rows_.clear();
    weights_.clear();
    for (int32_t k = head_[rank]; k >= 0; k = after_[k]) {
      const int64_t row = params_.plan.dst_row[first + k];
      rows_.push_back(Row(peer, row));
      if (peer.weights != nullptr) weights_.push_back(peer.weights[row]);
    }
    if (rows_.size() == 1 && peer.weights == nullptr && !widens_) return rows_[0];
    uint8_t* partial = scratch_.data() + rank * partial_bytes_;
    reduce_rows_(partial, rows_.data(), peer.weights != nullptr ? weights_.data() : nullptr,
                 static_cast<int64_t>(rows_.size()), params_.sizes.width);
    return partial;
  }

  const CombineParams& params_;
  const std::vector<const CombineParams*>& peers_;
  const int64_t partial_bytes_;
  const bool widens_;
  const ReduceFn reduce_rows_;
  const ReduceFn reduce_partials_;
  const bool in_place_;
  std::vector<const uint8_t*> next_;  // next staged row of each remote rank in this pass
  std::vector<uint64_t> used_;        // a bit per rank
  std::vector<int32_t> head_;         // [N] first slot of the token there, or -1
  std::vector<int32_t> after_;        // [K] next slot of the same rank, or -1
  std::vector<uint8_t> scratch_;
  std::vector<const void*> parts_;
  std::vector<const void*> rows_;
  std::vector<float> weights_;
};

void ReadWeightGrads(const Call& call, const CombineParams& params, const Exchange& exchange) {
  std::vector<const float*> next(call.ep_size());
  for (int64_t rank : exchange.staged) {
    next[rank] = reinterpret_cast<const float*>(call.Entries(call.ep_rank(), rank));
  }
  for (int64_t i = 0; i < params.sizes.tokens * params.sizes.top_k; ++i) {
    const int32_t rank = params.plan.dst_rank[i];
    if (rank < 0) {
      params.d_topk_weights[i] = 0.0f;
    } else if (exchange.in_place[rank] != nullptr) {
      params.d_topk_weights[i] = exchange.in_place[rank]->d_weights[params.plan.dst_row[i]];
    } else {
      params.d_topk_weights[i] = *next[rank]++;
    }
  }
}

// Partials of one pass for the ranks of other processes.
Status SendPass(Call& call, const CombineParams& params, const Passes& passes,
                const SourceOffsets& offsets, const std::vector<int64_t>& dests, int pass) {
  const bool only = passes.count == 1;
  for (int64_t dest : dests) {
    if (pass > 0) EP_RETURN_IF_ERROR(call.Await(dest, Consumed(pass - 1)));
    const int64_t middle =
        offsets.staged[dest] + params.plan.recv_count[dest * kRecvCountColumns + kStagedFirstHalf];
    SendPartials(call, params, passes, dest, pass == 0 ? offsets.staged[dest] : middle,
                 pass == 0 && !only ? middle : offsets.staged[dest + 1]);
    if (pass == 0 && params.d_weights != nullptr) SendWeightGrads(call, params, offsets, dest);
  }
  return Status();
}

}  // namespace

bool ReadsInPlace(const CombineParams& params) { return params.row_bytes >= kInPlaceBytes; }

Status RunCombine(Call& call, const CombineParams& params) {
  EP_RETURN_IF_ERROR(CheckPlan(call, params.sizes, params.plan));
  const Exchange exchange(call, params);
  EP_RETURN_IF_ERROR(CheckPeers(call, params, exchange.in_place));
  PreferHugePages(params.tokens, params.sizes.tokens * params.row_bytes);
  const Passes passes(call, params);
  const SourceOffsets offsets(params.plan, call.ep_size());
  const int64_t half = (params.sizes.tokens + 1) / 2;
  for (int pass = 0; pass < passes.count; ++pass) {
    EP_RETURN_IF_ERROR(SendPass(call, params, passes, offsets, exchange.staged, pass));
    if (!exchange.staged.empty()) call.Signal(Written(pass));
    for (int64_t source : exchange.staged) EP_RETURN_IF_ERROR(call.Await(source, Written(pass)));
    TokenSums sums(call, params, passes, exchange);
    const int64_t last = pass == 0 && passes.count > 1 ? half : params.sizes.tokens;
    for (int64_t token = pass == 0 ? 0 : half; token < last; ++token) sums.Sum(token);
    if (pass == 0 && params.d_weights != nullptr) ReadWeightGrads(call, params, exchange);
    if (pass + 1 < passes.count && !exchange.staged.empty()) call.Signal(Consumed(pass));
  }
  return Status();
}

}  // namespace ep_runtime
