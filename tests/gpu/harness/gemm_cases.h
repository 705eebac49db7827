// The products that are checked: shapes, loads and types.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_CASES_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_CASES_H_

#include <string>
#include <vector>

#include "gemm_case.h"

namespace gemm_test {

constexpr GemmProduct kProducts[] = {GemmProduct::kForward, GemmProduct::kDataGrad,
                                     GemmProduct::kWeightGrad};

// Kinds of operands: 16-bit; 8-bit with scales of groups, or of blocks; f32.
enum class Kind { kWide, kTensor, kBlock, kTf32 };

const char* Name(GemmProduct product);
const char* Name(FloatType type);
const char* Name(Kind kind);

// Shapes that take every way through the kernels, in all types; with `small`, in fewer types.
std::vector<GemmCase> FixedCases(GemmProduct product, Kind kind, bool small);
std::vector<GemmCase> RandomCases(Kind kind, int count);

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_CASES_H_
