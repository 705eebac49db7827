// Sizes of block calls as the native library has them. Reads lines of
//   tokens top_k capacity experts hidden inner columns ranks alignment rows kept_rows element_bytes
//   scaling
// and prints for each: tokens of a part, parts, bytes forward, bytes backward.
#include <cstdio>

#include "cuda/block/workspace.h"

int main() {
  using namespace ep_runtime::cuda::block;
  BlockSizes s{};
  int scaling = 0;
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d", &s.tokens, &s.top_k, &s.capacity,
                    &s.experts, &s.hidden, &s.inner, &s.columns, &s.ranks, &s.alignment, &s.rows,
                    &s.kept_rows, &s.element_bytes, &scaling) == 13) {
    s.scaling = static_cast<ep_runtime::cuda::GemmScaling>(scaling);
    Workspace unused;
    const auto bytes = [&](bool backward) {
      return static_cast<long long>(LayOut(s, backward, nullptr, &unused));
    };
    const int parts = NumParts(s);
    std::printf("%d %d %lld %lld\n", parts > 0 ? PartTokens(s) : 0, parts, bytes(false),
                bytes(true));
  }
  return 0;
}
