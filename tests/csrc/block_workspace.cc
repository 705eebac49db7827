// Prints sizes of block calls from the native library. Reads lines of
//
//   tokens top_k capacity experts hidden inner columns ranks alignment rows kept_rows element_bytes
//   scaling lane_rows spare packed
//
// and prints for each: tokens of a chunk, chunks, bytes forward, bytes backward, and how many pairs
// of a backward call's regions overlap, or leave the workspace, while both are read, without
// quantization.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/block/workspace.h"

namespace {

using namespace ep_runtime::cuda::block;

struct Region {
  const void* data;
  int64_t bytes;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const { return begin() + bytes; }
};

int CountOverlaps(const std::vector<Region>& regions, uintptr_t end) {
  int count = 0;
  for (size_t i = 0; i < regions.size(); ++i) {
    count += regions[i].data == nullptr || regions[i].end() > end;
    for (size_t j = 0; j < i; ++j) {
      count += regions[i].begin() < regions[j].end() && regions[j].begin() < regions[i].end();
    }
  }
  return count;
}

int CountOverlaps(const BlockSizes& s) {
  if (s.scaling != ep_runtime::cuda::GemmScaling::kNone) return 0;
  Workspace at;
  auto* base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 20);
  const uintptr_t end = (uintptr_t{1} << 20) + LayOut(s, /*backward=*/true, base, &at);
  const auto rows = [&](const void* data, int64_t width) {
    return Region{data, width * s.rows * s.element_bytes};
  };
  const auto copy = [&](const Copy& of, int64_t width) {
    return Region{of.data, width * TransposedRowsOf(s) * s.element_bytes};
  };
  std::vector<Region> wide = {rows(at.tokens, s.hidden), rows(at.grads, s.hidden),
                              rows(at.hidden, s.columns)};
  if (s.spare > 0) {
    const int64_t weight = int64_t{s.spare} * s.hidden * s.element_bytes;
    wide.push_back({at.wi_slots, weight * s.columns});
    wide.push_back({at.wo_slots, weight * s.inner});
  }
  const auto with = [&](std::vector<Region> others) {
    others.insert(others.end(), wide.begin(), wide.end());
    return CountOverlaps(others, end);
  };
  int count = with({rows(at.inner, s.inner), rows(at.d_inner, s.inner)});
  if (!TransposesRows(s)) return count;
  count += with({rows(at.inner, s.inner), copy(at.of_second.lhs, s.inner),
                 copy(at.of_second.grads, s.hidden)});
  return count + with({copy(at.of_first.lhs, s.hidden), copy(at.of_first.grads, s.columns)});
}

}  // namespace

int main() {
  BlockSizes s{};
  int scaling = 0, packed = 0;
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d", &s.tokens, &s.top_k,
                    &s.capacity, &s.experts, &s.hidden, &s.inner, &s.columns, &s.ranks,
                    &s.alignment, &s.rows, &s.kept_rows, &s.element_bytes, &scaling, &s.lane_rows,
                    &s.spare, &packed) == 16) {
    s.packed = packed != 0;
    s.scaling = static_cast<ep_runtime::cuda::GemmScaling>(scaling);
    Workspace unused;
    const auto bytes = [&](bool backward) {
      return static_cast<long long>(LayOut(s, backward, nullptr, &unused));
    };
    const int chunks = NumChunks(s);
    std::printf("%d %d %lld %lld %d\n", chunks > 0 ? ChunkTokens(s) : 0, chunks, bytes(false),
                bytes(true), CountOverlaps(s));
  }
  return 0;
}
