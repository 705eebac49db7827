// Lays out a block call's workspace.
#include "cuda/block/workspace.h"

#include <algorithm>

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

constexpr int64_t kRegionBytes = 1024;  // regions begin at multiples of this
constexpr int64_t kDecisionBytes = 4096;
constexpr int64_t kScaledValues = 128;  // values of a row that share a block's scale
constexpr int64_t kPaddedTo = 128;      // a transposed copy pads each group's rows to a multiple of
                                        // this
constexpr int64_t kCopied = 16;         // copies move multiples of 16 bytes

int64_t Blocks(int64_t values, int64_t each) { return (values + each - 1) / each; }

class Regions {
 public:
  explicit Regions(uint8_t* base) : base_(base) {}

  template <typename T>
  void Take(int64_t bytes, T** out) {
    *out = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += AlignUp(bytes, kRegionBytes);
  }
  void TakeWords(int64_t words, int32_t** out) { Take(4 * words, out); }
  // Lets the next regions begin at `at` and overlap the regions there.
  void BackTo(int64_t at) {
    most_ = std::max(most_, used_);
    used_ = at;
  }
  // Lets the next regions begin behind all earlier regions.
  void PastAll() { used_ = std::max(most_, used_); }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
  int64_t most_ = 0;  // largest end of a region before the last BackTo
};

void TakeChunk(const BlockSizes& s, Regions* regions, Workspace* out) {
  const int64_t tokens = ChunkTokens(s), slots = tokens * s.top_k;
  regions->TakeWords(slots, &out->topk_idx);
  regions->TakeWords(slots, &out->plan.dst_rank);
  regions->TakeWords(slots, &out->plan.dst_row);
  regions->TakeWords(PackedColumns(s.ranks) * s.ranks, &out->plan.recv_count);  // an upper bound
  regions->TakeWords(s.ranks * tokens + 1, &out->plan.staged_start);
  regions->TakeWords(s.rows, &out->plan.staged_row);
  regions->TakeWords(s.rows, &out->plan.staged_slot);
  regions->TakeWords(s.experts, &out->plan.kept);
  regions->TakeWords(s.experts, &out->plan.group_sizes);
  regions->TakeWords(1, &out->plan.num_recv);
}

void TakeSlots(const BlockSizes& s, bool backward, Regions* regions, Workspace* out) {
  // Gradients of 8-bit weights may be f32.
  const int64_t narrow = backward ? 4 : 1;
  const int64_t bytes = s.scaling == GemmScaling::kNone ? s.element_bytes : narrow;
  regions->Take(bytes * s.spare * s.hidden * s.columns, &out->wi_slots);
  regions->Take(bytes * s.spare * s.inner * s.hidden, &out->wo_slots);
}

void TakeQuantized(const BlockSizes& s, int64_t width, Regions* regions, QuantizedRows* out) {
  const bool tensor = s.scaling == GemmScaling::kTensor;
  regions->Take(s.rows * width, &out->data);
  regions->Take(4 * (tensor ? s.experts : s.rows * Blocks(width, kScaledValues)), &out->scale);
}

void TakeCopies(const BlockSizes& s, int64_t lhs, int64_t grads, Regions* regions, Copies* out) {
  const int64_t each = TransposedRowsOf(s);
  const auto take = [&](int64_t width, Copy* copy) {
    regions->Take(width * each, &copy->data);
    if (s.scaling == GemmScaling::kTensor) return;
    regions->Take(4 * Blocks(width, kScaledValues) * (each / kPaddedTo), &copy->scale);
  };
  take(lhs, &out->lhs);
  take(grads, &out->grads);
}

// Returns how many of a rank's tokens have sums that fit its lane with any routing. The number is
// even, because exact sums may take two rows each and then go in two halves.
int32_t SummedTokens(const BlockSizes& s) {
  const int32_t sums = std::min(s.top_k, s.ranks - 1);  // sums of a token from other ranks
  return sums < 1 ? s.tokens : s.lane_rows / sums / 2 * 2;
}

// Lays out activations, their gradients, and operands of weight gradients.
void LayOutInnerBwd(const BlockSizes& s, Regions* regions, Workspace* out) {
  const int64_t inner = int64_t{s.inner} * s.element_bytes, copied = TransposedRowsOf(s);
  const int64_t rows = s.rows;
  if (!TransposesRows(s)) {
    regions->Take(rows * inner, &out->inner);
    regions->Take(rows * inner, &out->d_inner);
    return;
  }
  regions->Take(copied * s.hidden * s.element_bytes, &out->of_second.grads.data);
  out->of_first.lhs = out->of_second.grads;
  const int64_t at = regions->used();
  regions->Take(rows * inner, &out->inner);
  regions->Take(copied * inner, &out->of_second.lhs.data);  // `copied` is at least W
  out->d_inner = out->of_second.lhs.data;
  regions->BackTo(at);
  regions->Take(copied * s.columns * s.element_bytes, &out->of_first.grads.data);
  regions->PastAll();
}

void LayOutQuantized(const BlockSizes& s, bool hidden, Regions* regions, Workspace* out) {
  regions->Take(int64_t{s.rows} * s.hidden * s.element_bytes, &out->tokens);
  if (hidden) regions->Take(int64_t{s.rows} * s.columns * s.element_bytes, &out->hidden);
  regions->Take(int64_t{4} * s.experts, &out->amax);
  const int64_t at = regions->used();
  TakeQuantized(s, s.hidden, regions, &out->q_tokens);
  if (!ProductActivates(s)) regions->BackTo(at);
  TakeQuantized(s, s.inner, regions, &out->q_inner);
  regions->PastAll();
}

void LayOutQuantizedBwd(const BlockSizes& s, Regions* regions, Workspace* out) {
  regions->Take(int64_t{4} * s.experts, &out->amax);
  TakeQuantized(s, s.hidden, regions, &out->q_tokens);
  const int64_t narrow = regions->used();
  TakeQuantized(s, s.hidden, regions, &out->q_grads);
  TakeQuantized(s, s.inner, regions, &out->q_inner);
  regions->BackTo(narrow);
  TakeQuantized(s, s.columns, regions, &out->q_hidden);
  regions->PastAll();
  const int64_t wide = regions->used();
  regions->Take(int64_t{s.rows} * s.columns * s.element_bytes, &out->hidden);
  regions->Take(int64_t{s.rows} * s.inner * s.element_bytes, &out->d_inner);
  regions->BackTo(wide);
  TakeCopies(s, s.hidden, s.columns, regions, &out->of_first);
  regions->PastAll();
  // This region holds one after another: wide rows as they arrive; the weight, after the rows are
  // quantized; the transposed copies; the rows that combine sends while dwi is computed.
  const int64_t late = regions->used();
  regions->Take(int64_t{s.rows} * s.hidden * s.element_bytes, &out->tokens);
  out->grads = out->tokens;
  regions->BackTo(late);
  regions->Take(int64_t{s.experts} * s.columns * s.hidden, &out->wi);
  regions->BackTo(late);
  TakeCopies(s, s.inner, s.hidden, regions, &out->of_second);
  regions->PastAll();
}

}  // namespace

bool SendsQuantized(const BlockSizes& s) {
  return s.scaling == GemmScaling::kBlock && s.hidden % kCopied == 0 &&
         4 * Blocks(s.hidden, kScaledValues) % kCopied == 0;
}

bool ProductActivates(const BlockSizes& s) {
  if (s.columns == s.inner) return false;
  return s.scaling == GemmScaling::kBlock ? s.inner % kScaledValues == 0
                                          : s.scaling == GemmScaling::kNone && s.element_bytes == 2;
}

bool TransposesRows(const BlockSizes& s) {
  return s.scaling == GemmScaling::kNone && s.element_bytes == 4;
}

int64_t QuantizedRowBytes(const BlockSizes& s) {
  return s.hidden + 4 * Blocks(s.hidden, kScaledValues);
}

int32_t ChunkTokens(const BlockSizes& s) {
  if (s.rows >= s.capacity) return SummedTokens(s);
  // All slots of a token may be rows of one rank, because a token may name an expert twice.
  const int64_t rows = int64_t{s.rows} - int64_t{s.experts} * (s.alignment - 1);
  return std::min(static_cast<int32_t>(rows / (int64_t{s.ranks} * s.top_k)), SummedTokens(s));
}

int32_t NumChunks(const BlockSizes& s) {
  if (s.rows >= s.capacity && s.tokens <= SummedTokens(s)) return 0;
  const int32_t tokens = ChunkTokens(s);
  return tokens < 1 ? 0 : (s.tokens + tokens - 1) / tokens;
}

int64_t TransposedRowsOf(const BlockSizes& s) {
  return (s.rows + (kPaddedTo - 1) * std::min(s.experts, s.rows)) / kPaddedTo * kPaddedTo;
}

int64_t LayOut(const BlockSizes& s, bool backward, uint8_t* base, Workspace* out) {
  *out = Workspace{};
  Regions regions(base);
  const bool chunks = NumChunks(s) > 0;
  const auto rows = [&](int64_t width) { return s.rows * width * s.element_bytes; };
  const bool hidden = backward || (!ProductActivates(s) && (chunks || s.kept_rows < s.rows));
  regions.Take(kDecisionBytes + int64_t{16} * s.experts, &out->decision);
  if (chunks) TakeChunk(s, &regions, out);
  if (s.spare > 0) TakeSlots(s, backward, &regions, out);
  regions.Take(int64_t{4} * s.rows, &out->weights);
  if (backward) regions.Take(int64_t{4} * s.rows, &out->d_weights);
  if (SendsQuantized(s) && !s.packed) regions.Take(s.tokens * QuantizedRowBytes(s), &out->sent);
  if (s.scaling != GemmScaling::kNone) {
    backward ? LayOutQuantizedBwd(s, &regions, out) : LayOutQuantized(s, hidden, &regions, out);
    return regions.used();
  }
  regions.Take(rows(s.hidden), &out->tokens);
  if (backward) regions.Take(rows(s.hidden), &out->grads);
  if (hidden) regions.Take(rows(s.columns), &out->hidden);
  if (TransposesRows(s)) {
    regions.Take(int64_t{4} * s.experts * s.columns * s.hidden, &out->weights_32);
  }
  if (backward) {
    LayOutInnerBwd(s, &regions, out);
  } else {
    regions.Take(rows(s.inner), &out->inner);
  }
  return regions.used();
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
