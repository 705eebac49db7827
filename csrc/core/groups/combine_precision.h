// CombinePrecision: the format in which combine sends sums.
#ifndef EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_
#define EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_

namespace ep_runtime {

// The format to which the sum of a token's rows on one rank is rounded before it is sent to the
// token's rank.
enum class CombinePrecision {
  kFast,   // the type of the rows
  kExact,  // f32 (f64 for f64 rows)
  kFp8,    // e4m3 with an f32 scale for each kFp8Block values
};

constexpr int kFp8Block = 128;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_COMBINE_PRECISION_H_
