// Computes the expected value of an element of a product: a sum in f64.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_EXPECTED_CUH_
#define EP_RUNTIME_TESTS_GPU_GEMM_EXPECTED_CUH_

#include <cstdint>

#include "gemm_values.cuh"

namespace gemm_test {

struct Check {
  GemmProduct product;
  FloatType type, rhs_type, out_type;
  GemmScaling scaling;
  int64_t rows;
  int in_features, out_features, experts, groups;
  const void *lhs, *rhs, *bias, *out;
  const float *lhs_scale, *rhs_scale;
  const int *row_group, *starts, *sizes;
  const int* padded;  // where groups begin in transposed copies
  bool clear_slack;
  double sums;  // tolerance of sums
};

struct Sum {
  double value = 0;
  double size = 0;
  __device__ void Add(double a, double b) {
    value += a * b;
    size += fabs(a * b);
  }
};

// Factor of the product of a row's and a weight's value at depth `d`.
__device__ inline double ScaleAt(const Check& c, int64_t row, int column, int64_t d) {
  if (c.scaling == GemmScaling::kNone) return 1;
  const int group = c.row_group[row], expert = group % c.experts;
  if (c.scaling == GemmScaling::kTensor) {
    return static_cast<double>(c.lhs_scale[group]) * c.rhs_scale[expert];
  }
  const bool forward = c.product == GemmProduct::kForward;
  const int in = (c.in_features + 127) / 128, out = (c.out_features + 127) / 128;
  const int64_t k = forward ? d / 128 : column / 128, n = forward ? column / 128 : d / 128;
  return static_cast<double>(c.lhs_scale[row * (forward ? in : out) + d / 128]) *
         c.rhs_scale[(expert * static_cast<int64_t>(in) + k) * out + n];
}

__device__ inline void ExpectWeight(const Check& c, int64_t row, int column, Sum* sum) {
  const int64_t k_count = c.in_features, n_count = c.out_features;
  const int64_t feature = row % k_count;
  for (int g = static_cast<int>(row / k_count); g < c.groups; g += c.experts) {
    for (int64_t r = c.starts[g]; r < c.starts[g] + c.sizes[g]; ++r) {
      const int64_t block = (c.padded[g] + r - c.starts[g]) / 128;
      double scale = 1;
      if (c.scaling == GemmScaling::kTensor) {
        scale = static_cast<double>(c.lhs_scale[g]) * c.rhs_scale[g];
      } else if (c.scaling == GemmScaling::kBlock) {
        scale = static_cast<double>(c.lhs_scale[block * ((k_count + 127) / 128) + feature / 128]) *
                c.rhs_scale[block * ((n_count + 127) / 128) + column / 128];
      }
      sum->Add(scale * LoadFloat(c.lhs, c.type, r * k_count + feature),
               LoadFloat(c.rhs, c.rhs_type, r * n_count + column));
    }
  }
}

// Computes the expected sum. `width` is of an output row. Returns false if the element is in no
// group's row.
__device__ inline bool Expect(const Check& c, int64_t row, int column, Sum* sum) {
  const int64_t k_count = c.in_features, n_count = c.out_features;
  if (c.product == GemmProduct::kWeightGrad) {
    ExpectWeight(c, row, column, sum);
    return true;
  }
  if (c.row_group[row] < 0) return false;
  const int expert = c.row_group[row] % c.experts;
  const bool forward = c.product == GemmProduct::kForward;
  const int64_t depth = forward ? k_count : n_count;
  for (int64_t d = 0; d < depth; ++d) {
    const int64_t at = forward ? (expert * k_count + d) * n_count + column
                               : (expert * k_count + column) * n_count + d;
    sum->Add(ScaleAt(c, row, column, d) * LoadFloat(c.lhs, c.type, row * depth + d),
             LoadFloat(c.rhs, c.rhs_type, at));
  }
  if (c.bias != nullptr) {
    const float bias = LoadFloat(c.bias, FloatType::kF32, expert * n_count + column);
    sum->value += bias;
    sum->size += fabs(static_cast<double>(bias));
  }
  return true;
}

// Whether an element in no group's row is right: zero, or the poison from before.
__device__ inline bool IsSlack(const Check& c, int64_t i) {
  const uint32_t want = c.clear_slack ? 0 : 0xFFFFFFFFu;
  if (c.out_type == FloatType::kF32) return static_cast<const uint32_t*>(c.out)[i] == want;
  return static_cast<const uint16_t*>(c.out)[i] == static_cast<uint16_t>(want);
}

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_EXPECTED_CUH_
