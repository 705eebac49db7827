#include "cuda/block/workspace.h"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

constexpr int64_t kRegionBytes = 1024;  // they begin at multiples of it
constexpr int64_t kDecisionBytes = 4096;

class Regions {
 public:
  explicit Regions(uint8_t* base) : base_(base) {}

  template <typename T>
  void Take(int64_t bytes, T** out) {
    *out = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += AlignUp(bytes, kRegionBytes);
  }
  void TakeWords(int64_t words, int32_t** out) { Take(4 * words, out); }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

void TakePart(const BlockSizes& s, Regions* regions, Workspace* out) {
  const int64_t tokens = PartTokens(s), slots = tokens * s.top_k;
  regions->TakeWords(slots, &out->topk_idx);
  regions->TakeWords(slots, &out->plan.dst_rank);
  regions->TakeWords(slots, &out->plan.dst_row);
  regions->TakeWords(int64_t{4} * s.ranks, &out->plan.recv_count);
  regions->TakeWords(s.ranks * tokens + 1, &out->plan.staged_start);
  regions->TakeWords(s.rows, &out->plan.staged_row);
  regions->TakeWords(s.rows, &out->plan.staged_slot);
  regions->TakeWords(s.experts, &out->plan.kept);
  regions->TakeWords(s.experts, &out->plan.group_sizes);
  regions->TakeWords(1, &out->plan.num_recv);
}

}  // namespace

int32_t PartTokens(const BlockSizes& s) {
  // All slots of a token may be rows of one rank, as an expert may be there more than once.
  const int64_t rows = int64_t{s.rows} - int64_t{s.experts} * (s.alignment - 1);
  return static_cast<int32_t>(rows / (int64_t{s.ranks} * s.top_k));
}

int32_t NumParts(const BlockSizes& s) {
  if (s.rows >= s.capacity) return 0;
  const int32_t tokens = PartTokens(s);
  return tokens < 1 ? 0 : (s.tokens + tokens - 1) / tokens;
}

int64_t LayOut(const BlockSizes& s, bool backward, uint8_t* base, Workspace* out) {
  *out = Workspace{};
  Regions regions(base);
  const bool parts = NumParts(s) > 0;
  const auto rows = [&](int64_t width) { return s.rows * width * s.element_bytes; };
  regions.Take(kDecisionBytes + int64_t{16} * s.experts, &out->decision);
  if (parts) TakePart(s, &regions, out);
  regions.Take(int64_t{4} * s.rows, &out->weights);
  if (backward) regions.Take(int64_t{4} * s.rows, &out->d_weights);
  regions.Take(rows(s.hidden), &out->tokens);
  if (backward) regions.Take(rows(s.hidden), &out->grads);
  if (backward || parts || s.kept_rows < s.rows) regions.Take(rows(s.columns), &out->hidden);
  regions.Take(rows(s.inner), &out->inner);
  if (backward) regions.Take(rows(s.inner), &out->d_inner);
  return regions.used();
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
