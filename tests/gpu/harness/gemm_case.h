// A grouped product on random data, checked against sums in f64.
#ifndef EP_RUNTIME_TESTS_GPU_GEMM_CASE_H_
#define EP_RUNTIME_TESTS_GPU_GEMM_CASE_H_

#include <string>
#include <vector>

#include "cuda/gemm/grouped_gemm.h"
#include "memory.h"

namespace gemm_test {

namespace ec = ep_runtime::cuda;
using ec::FloatType;
using ec::GemmProduct;
using ec::GemmScaling;

struct GemmCase {
  std::string name;
  GemmProduct product = GemmProduct::kForward;
  FloatType type = FloatType::kBF16;
  FloatType rhs_type = FloatType::kBF16;
  FloatType out_type = FloatType::kBF16;
  GemmScaling scaling = GemmScaling::kNone;
  // Operands are small integers and scales powers of two, so that only the result rounds.
  bool whole_numbers = false;
  int slabs = 1;
  int slab_rows = 0;
  int experts = 0;
  int in_features = 0;
  int out_features = 0;
  std::vector<int> sizes;  // [slabs * groups]
  bool bias = false;
  bool clear_slack = false;
  // The weights, or their gradient, are a pair of arrays of half the columns.
  bool pair = false;
  ec::GemmTuning tuning;

  int groups_per_slab() const { return static_cast<int>(sizes.size()) / slabs; }
  int64_t rows() const { return int64_t{slabs} * slab_rows; }
  bool narrow() const { return ec::BytesOf(type) == 1; }
  bool can_be_pair() const {
    return out_features % 128 == 0 && (product == GemmProduct::kWeightGrad || !narrow());
  }
  // What the product is, without its arrays.
  ec::GroupedGemmParams Params() const;
  // Whether products need transposed copies. A forward one of tf32 makes them itself.
  bool transposed() const {
    return product == GemmProduct::kWeightGrad ? ec::BytesOf(type) != 2
                                               : narrow() && product == GemmProduct::kForward;
  }
};

// Group and range of every row. Rows beyond a slab are cut off.
struct Layout {
  std::vector<int> row_group;  // [rows], -1: of no group
  std::vector<int> starts;     // [groups]
  std::vector<int> padded;     // [groups], starts in transposed copies
  std::vector<int> sizes;
};
Layout LayOut(const GemmCase& c);

struct Mismatch {
  unsigned long long count;
  unsigned long long first;  // its index in the output
  float got;
  double want;
  double worst;                      // error / tolerance of elements that fit
  unsigned long long in_rows[8];     // mismatches by 16 rows of a tile
  unsigned long long in_columns[8];  // mismatches by 32 columns of a tile
};

// Device arrays of a case: operands with NaN in rows of no group, and a poisoned output.
class Data {
 public:
  explicit Data(const GemmCase& c);
  ~Data();
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  ec::GroupedGemmParams Params() const;
  // Makes the copies with the contracted dim along memory that 8-bit and tf32 products need.
  void Transpose(cudaStream_t stream) const;
  // Launches the product, with these parameters.
  cudaError_t Launch(cudaStream_t stream, const int32_t* wanted = nullptr, bool adds = false) const;
  void Poison();
  // Compares the output with its expected values.
  Mismatch Compare();
  // Counts bytes in which two runs differ. Each run makes its transposed copies.
  unsigned long long RunTwiceAndDiffer(cudaStream_t stream);
  // Counts wrong bytes of launches as block calls make them: one with wanted=0, which must write
  // nothing, and one that adds to zeros, which must give the bytes of the run before.
  unsigned long long RunAsInBlocks(cudaStream_t stream);
  int64_t out_elements() const { return out_elements_; }

 private:
  void* Allocate(int64_t bytes);
  template <typename T>
  T* Upload(const std::vector<T>& values);
  void FillOperands();
  void FillOutput(int byte, int64_t guard_bytes);
  unsigned long long Differ(cudaStream_t stream, const void* want);
  void SplitWeights();
  void FillScales();
  int64_t lhs_width() const;
  int64_t rhs_rows() const;

  GemmCase case_;
  Layout layout_;
  std::vector<void*> owned_;
  int64_t out_elements_ = 0;
  int64_t out_bytes_ = 0;
  int* sizes_ = nullptr;
  int* row_group_ = nullptr;
  int* starts_ = nullptr;
  int* clipped_ = nullptr;
  int* padded_ = nullptr;
  void* lhs_ = nullptr;
  void* rhs_ = nullptr;
  void* transposed_lhs_ = nullptr;  // transposed copies; null: the product takes the operand itself
  void* transposed_rhs_ = nullptr;
  void* rhs_copy_ = nullptr;  // written by the product
  float* lhs_scale_ = nullptr;
  float* rhs_scale_ = nullptr;
  void* bias_ = nullptr;
  void* out_ = nullptr;
  void* halves_[2] = {nullptr,
                      nullptr};  // of the weights, or of the output with guards behind them
  Mismatch* result_ = nullptr;
};

}  // namespace gemm_test

#endif  // EP_RUNTIME_TESTS_GPU_GEMM_CASE_H_
