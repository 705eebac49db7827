// CombinePrecision: the type in which combine sends sums.
#ifndef EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_
#define EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_

namespace ep_runtime {

// How the sum of a token's rows on one rank is rounded for its way back to the token.
enum class CombinePrecision {
  kFast,   // in the type of the rows
  kExact,  // in f32 (f64 of f64 rows)
  kFp8,    // e4m3 with an f32 scale for each kFp8Block values
};

constexpr int kFp8Block = 128;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_
