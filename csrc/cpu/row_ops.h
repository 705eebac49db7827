// Arithmetic on rows, compiled once per instruction set and picked when the library is loaded.
//
// Sums run in fp32 (fp64 for f64 rows) in the order the caller gives, with every product rounded
// before it is added, so that results have the same bits on every machine and with the XLA
// transport.
#ifndef EP_RUNTIME_CPU_ROW_OPS_H_
#define EP_RUNTIME_CPU_ROW_OPS_H_

#include <cstdint>

#include "core/groups/combine_precision.h"

namespace ep_runtime {

enum RowType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kNumRowTypes = 4 };

// dst[i] = sum over r of rows[r][i], each multiplied by weights[r] first if `weights` is given.
// Without rows the result is zeros.
using ReduceFn = void (*)(void* dst, const void* const* rows, const float* weights, int64_t count,
                          int64_t width);
// dst[i] = weight * src[i]
using ScaleFn = void (*)(void* dst, const void* src, float weight, int64_t width);
// Adds up the products a[i] * b[i] as a halving tree. `scratch` has room for (width + 1) / 2
// doubles.
using DotFn = float (*)(const void* a, const void* b, void* scratch, int64_t width);

// Layout of a sum as 8-bit floats: `width` values, then their scales from Fp8ScalesAt on;
// Fp8SumBytes is the size of both. The functions are static, because otherwise the linker could
// pick a copy compiled for a newer processor.
static constexpr int64_t Fp8ScalesAt(int64_t width) { return (width + 3) / 4 * 4; }
static constexpr int64_t Fp8SumBytes(int64_t width) {
  return Fp8ScalesAt(width) + (width + kFp8Block - 1) / kFp8Block * 4;
}

struct RowOps {
  ReduceFn reduce[kNumRowTypes];            // rows and result of the row type
  ReduceFn reduce_to_wide[kNumRowTypes];    // result in fp32 (fp64 for f64)
  ReduceFn reduce_from_wide[kNumRowTypes];  // rows in fp32 (fp64 for f64)
  ReduceFn reduce_to_fp8[kNumRowTypes];     // result as 8-bit floats; null for f64
  ReduceFn reduce_from_fp8[kNumRowTypes];   // rows as 8-bit floats, no weights; null for f64
  ScaleFn scale[kNumRowTypes];
  DotFn dot[kNumRowTypes];
  // Copies with stores that bypass the caches, for rows that are read only after much other memory.
  void (*stream)(void* dst, const void* src, int64_t bytes);
};

// Returns the best table for this processor, unless a test chose another.
const RowOps& GetRowOps();

enum RowOpsLevel : int { kBestRowOps = 0, kBaseline = 1, kAvx2 = 2, kAvx512 = 3 };
// Returns false if this processor or build lacks that level.
bool UseRowOps(RowOpsLevel level);

// One table per instruction set; null if the compiler of this build does not support the set.
const RowOps* RowOpsBaseline();
const RowOps* RowOpsAvx2();
const RowOps* RowOpsAvx512();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_ROW_OPS_H_
