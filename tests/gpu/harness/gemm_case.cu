// Runs one grouped product on random data, and checks it.
#include <algorithm>
#include <cmath>

#include "cuda/gemm/copies/transpose.h"
#include "gemm_case.h"
#include "gemm_expected.cuh"

namespace gemm_test {
namespace {

constexpr int kGuardBytes = 4096;  // after the output; must not be written

using ec::BytesOf;

// Tolerance relative to sum(|products|), besides the result's own rounding. f32 sums may have
// another order; tensor cores add 8-bit products up with some 13 bits, over 128 elements or over
// all of them.
constexpr double kWideSums = 1e-5;
constexpr double kPromotedSums = 1e-3;

// Fills with normal values, or integers of -2 to 2, and with NaN in rows of no group.
__global__ void Fill(void* data, FloatType type, int64_t rows, int64_t width, uint32_t seed,
                     float scale, bool whole, const int* row_group) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * width; i += step) {
    const bool slack = row_group != nullptr && row_group[i / width] < 0;
    const float value = whole ? static_cast<float>(Hash(i, seed) % 5) - 2 : NormalAt(i, seed);
    StoreFloat(data, type, i, slack ? nanf("") : scale * value);
  }
}

__global__ void CompareAll(Check c, int64_t elements, int width, Mismatch* result) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < elements; at += step) {
    Sum sum;
    const bool owned = Expect(c, at / width, static_cast<int>(at % width), &sum);
    const float got = LoadFloat(c.out, c.out_type, at);
    const double rounding = c.out_type == FloatType::kF32    ? 0
                            : c.out_type == FloatType::kBF16 ? 1.0 / 256
                                                             : 1.0 / 2048;
    const double tolerance = rounding * fabs(sum.value) + c.sums * sum.size + 1e-7;
    const double error = fabs(got - sum.value);
    const bool right = owned ? error <= tolerance : IsSlack(c, at);
    if (owned && right) {
      atomicMax(reinterpret_cast<unsigned long long*>(&result->worst),
                static_cast<unsigned long long>(__double_as_longlong(error / tolerance)));
    }
    if (right) continue;
    atomicAdd(&result->count, 1ull);
    atomicAdd(&result->in_rows[at / width % 128 / 16], 1ull);
    atomicAdd(&result->in_columns[at % width % 256 / 32], 1ull);
    if (atomicMin(&result->first, static_cast<unsigned long long>(at)) > at) {
      result->got = got;
      result->want = owned ? sum.value : nan("");
    }
  }
}

__global__ void CountDifferent(const uint8_t* a, const uint8_t* b, int64_t bytes,
                               unsigned long long* count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  unsigned long long mine = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < bytes; i += step) {
    mine += a[i] != b[i];
  }
  if (mine > 0) atomicAdd(count, mine);
}

constexpr int kBlocks = 132 * 8;
constexpr int kThreads = 256;

}  // namespace

Layout LayOut(const GemmCase& c) {
  Layout layout;
  layout.row_group.assign(c.rows(), -1);
  const int groups = c.groups_per_slab();
  for (int slab = 0; slab < c.slabs; ++slab) {
    int start = 0;
    int64_t at = slab * ec::gemm::PaddedSlabRows(c.slab_rows, groups);
    for (int g = 0; g < groups; ++g) {
      const int group = slab * groups + g;
      const int size = std::min(c.sizes[group], c.slab_rows - start);
      layout.starts.push_back(slab * c.slab_rows + start);
      layout.padded.push_back(static_cast<int>(at));
      at += ec::gemm::PadRows(size);
      layout.sizes.push_back(size);
      for (int r = 0; r < size; ++r) {
        layout.row_group[int64_t{slab} * c.slab_rows + start + r] = group;
      }
      start += size;
    }
  }
  return layout;
}

int64_t Data::lhs_width() const {
  return case_.product == GemmProduct::kDataGrad ? case_.out_features : case_.in_features;
}

int64_t Data::rhs_rows() const {
  const bool by_expert = case_.product == GemmProduct::kWeightGrad;
  return by_expert ? case_.rows() : int64_t{case_.experts} * case_.in_features;
}

Data::Data(const GemmCase& c) : case_(c), layout_(LayOut(c)) {
  const bool by_expert = c.product == GemmProduct::kWeightGrad;
  const bool backward = c.product == GemmProduct::kDataGrad;
  const int64_t rows = c.rows(), in = c.in_features, out = c.out_features;
  out_elements_ = by_expert ? c.experts * in * out : rows * (backward ? in : out);
  out_bytes_ = out_elements_ * BytesOf(c.out_type);
  sizes_ = Upload(c.sizes);
  row_group_ = Upload(layout_.row_group);
  starts_ = Upload(layout_.starts);
  clipped_ = Upload(layout_.sizes);
  padded_ = Upload(layout_.padded);
  out_ = Allocate(out_bytes_ + kGuardBytes);
  result_ = static_cast<Mismatch*>(Allocate(sizeof(Mismatch)));
  FillOperands();
  if (c.pair) SplitWeights();
  if (c.narrow()) FillScales();
  if (c.bias) {
    bias_ = Allocate(c.experts * out * 4);
    Fill<<<kBlocks, kThreads>>>(bias_, FloatType::kF32, c.experts, out, 3, 8.0f, c.whole_numbers,
                                nullptr);
  }
  Transpose(nullptr);
  Poison();
}

// Transposed copies are NaN at first, so that products can only read what was written.
void Data::FillOperands() {
  const GemmCase& c = case_;
  const bool by_expert = c.product == GemmProduct::kWeightGrad;
  const int64_t rows = c.rows(), out = c.out_features;
  lhs_ = Allocate(rows * lhs_width() * BytesOf(c.type));
  rhs_ = Allocate(rhs_rows() * out * BytesOf(c.rhs_type));
  Fill<<<kBlocks, kThreads>>>(lhs_, c.type, rows, lhs_width(), 1, 1.0f, c.whole_numbers,
                              row_group_);
  Fill<<<kBlocks, kThreads>>>(rhs_, c.rhs_type, rhs_rows(), out, 2, 1.0f, c.whole_numbers,
                              by_expert ? row_group_ : nullptr);
  const auto poisoned = [&](int64_t bytes) {
    void* memory = Allocate(bytes);
    CHECK_CUDA(cudaMemset(memory, 0xFF, bytes));
    return memory;
  };
  if (c.type == FloatType::kTF32 && c.product == GemmProduct::kForward) {
    rhs_copy_ = poisoned(rhs_rows() * out * BytesOf(c.type));
  }
  if (!c.transposed()) return;
  const int64_t padded = c.slabs * ec::gemm::PaddedSlabRows(c.slab_rows, c.groups_per_slab());
  const int64_t each = BytesOf(c.type);
  if (by_expert) transposed_lhs_ = poisoned(lhs_width() * padded * each);
  transposed_rhs_ = poisoned((by_expert ? out * padded : rhs_rows() * out) * each);
}

void Data::SplitWeights() {
  const bool by_expert = case_.product == GemmProduct::kWeightGrad;
  const int64_t bytes =
      by_expert ? out_bytes_ / 2 : rhs_rows() * case_.out_features * BytesOf(case_.rhs_type) / 2;
  for (void*& half : halves_) half = Allocate(bytes + kGuardBytes);
  if (by_expert) return;
  const size_t width = bytes / rhs_rows();
  for (int i = 0; i < 2; ++i) {
    CHECK_CUDA(cudaMemcpy2D(halves_[i], width, static_cast<uint8_t*>(rhs_) + i * width, 2 * width,
                            width, rhs_rows(), cudaMemcpyDeviceToDevice));
  }
}

void Data::FillScales() {
  const GemmCase& c = case_;
  const auto draw = [&](int64_t count, uint32_t seed) {
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; ++i) {
      seed = seed * 1664525u + 1013904223u;
      const float exponent = static_cast<float>((seed >> 16) % 7) - 3;
      values[i] = std::exp2(exponent) * (c.whole_numbers ? 1 : 1 + (seed >> 24) / 256.0f);
    }
    return Upload(values);
  };
  const int64_t groups = c.sizes.size();
  if (c.scaling == GemmScaling::kTensor) {
    lhs_scale_ = draw(groups, 11);
    rhs_scale_ = draw(c.product == GemmProduct::kWeightGrad ? groups : c.experts, 12);
    return;
  }
  const int64_t in = (c.in_features + 127) / 128, out = (c.out_features + 127) / 128;
  if (c.product == GemmProduct::kWeightGrad) {
    const int64_t blocks =
        c.slabs * ec::gemm::PaddedSlabRows(c.slab_rows, c.groups_per_slab()) / 128;
    lhs_scale_ = draw(blocks * in, 11);
    rhs_scale_ = draw(blocks * out, 12);
    return;
  }
  lhs_scale_ = draw(c.rows() * (c.product == GemmProduct::kForward ? in : out), 11);
  rhs_scale_ = draw(c.experts * in * out, 12);
}

void Data::Transpose(cudaStream_t stream) const {
  const GemmCase& c = case_;
  const auto rows = [&](const void* from, void* to, int width) {
    const ec::gemm::Groups groups{sizes_, static_cast<int32_t>(c.sizes.size()), c.groups_per_slab(),
                                  c.experts, c.slab_rows};
    if (c.narrow()) {
      CHECK_CUDA(ec::gemm::LaunchTranspose(
          stream, ec::gemm::TransposedRows{groups, static_cast<const uint8_t*>(from),
                                           static_cast<uint8_t*>(to), c.slabs, width}));
    } else {
      CHECK_CUDA(ec::gemm::LaunchTranspose(
          stream, ec::gemm::TransposedFloatRows{groups, static_cast<const float*>(from),
                                                static_cast<float*>(to), c.slabs, width}));
    }
  };
  if (transposed_lhs_ != nullptr) {
    rows(lhs_, transposed_lhs_, c.in_features);
    rows(rhs_, transposed_rhs_, c.out_features);
  } else if (transposed_rhs_ != nullptr) {
    CHECK_CUDA(ec::gemm::LaunchTranspose(
        stream, ec::gemm::TransposedPlanes{static_cast<const uint8_t*>(rhs_),
                                           static_cast<uint8_t*>(transposed_rhs_), c.experts,
                                           c.in_features, c.out_features}));
  }
}

Data::~Data() {
  for (void* memory : owned_) cudaFree(memory);
}

void* Data::Allocate(int64_t bytes) {
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, std::max<int64_t>(bytes, 16)));
  owned_.push_back(memory);
  return memory;
}

template <typename T>
T* Data::Upload(const std::vector<T>& values) {
  auto* to = static_cast<T*>(Allocate(values.size() * sizeof(T)));
  CHECK_CUDA(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

ec::GroupedGemmParams GemmCase::Params() const {
  ec::GroupedGemmParams params{};
  params.product = product;
  params.type = type;
  params.rhs_type = rhs_type;
  params.out_type = out_type;
  params.scaling = scaling;
  params.num_slabs = slabs;
  params.slab_rows = slab_rows;
  params.groups_per_slab = groups_per_slab();
  params.num_experts = experts;
  params.in_features = in_features;
  params.out_features = out_features;
  params.clear_slack = clear_slack;
  params.tuning = tuning;
  return params;
}

ec::GroupedGemmParams Data::Params() const {
  const GemmCase& c = case_;
  ec::GroupedGemmParams params = c.Params();
  params.group_sizes = sizes_;
  params.lhs = transposed_lhs_ != nullptr ? transposed_lhs_ : lhs_;
  params.rhs = transposed_rhs_ != nullptr ? transposed_rhs_ : rhs_;
  params.rhs_copy = rhs_copy_;
  params.lhs_scale = lhs_scale_;
  params.rhs_scale = rhs_scale_;
  params.bias = bias_;
  params.bias_type = FloatType::kF32;
  params.out = out_;
  if (c.pair && c.product == GemmProduct::kWeightGrad) {
    params.out = halves_[0];
    params.out_up = halves_[1];
  } else if (c.pair) {
    params.rhs = halves_[0];
    params.rhs_up = halves_[1];
  }
  return params;
}

void Data::Poison() { FillOutput(0xFF, kGuardBytes); }

void Data::FillOutput(int byte, int64_t guard_bytes) {
  CHECK_CUDA(cudaMemset(out_, byte, out_bytes_ + guard_bytes));
  if (!case_.pair || case_.product != GemmProduct::kWeightGrad) return;
  for (void* half : halves_) CHECK_CUDA(cudaMemset(half, byte, out_bytes_ / 2 + guard_bytes));
}

cudaError_t Data::Launch(cudaStream_t stream, const int32_t* wanted, bool adds) const {
  ec::GroupedGemmParams params = Params();
  params.wanted = wanted;
  params.adds = adds;
  const cudaError_t error = ec::LaunchGroupedGemm(stream, params);
  if (error != cudaSuccess || !case_.pair || case_.product != GemmProduct::kWeightGrad) {
    return error;
  }
  // Join both halves into the array that is compared. A guard that was written makes it wrong.
  const int64_t rows = int64_t{case_.experts} * case_.in_features;
  const size_t width = out_bytes_ / 2 / rows;
  auto* out = static_cast<uint8_t*>(out_);
  for (int i = 0; i < 2; ++i) {
    CHECK_CUDA(cudaMemcpy2DAsync(out + i * width, 2 * width, halves_[i], width, width, rows,
                                 cudaMemcpyDeviceToDevice, stream));
    CHECK_CUDA(cudaMemcpyAsync(out + out_bytes_ + i * (kGuardBytes / 2),
                               static_cast<uint8_t*>(halves_[i]) + out_bytes_ / 2, kGuardBytes / 2,
                               cudaMemcpyDeviceToDevice, stream));
  }
  return cudaSuccess;
}

Mismatch Data::Compare() {
  const GemmCase& c = case_;
  const bool backward = c.product == GemmProduct::kDataGrad;
  const double sums = c.whole_numbers ? 0 : c.narrow() ? kPromotedSums : kWideSums;
  const Check check{
      c.product,     c.type,        c.rhs_type,     c.out_type, c.scaling,
      c.rows(),      c.in_features, c.out_features, c.experts,  static_cast<int>(c.sizes.size()),
      lhs_,          rhs_,          bias_,          out_,       lhs_scale_,
      rhs_scale_,    row_group_,    starts_,        clipped_,   padded_,
      c.clear_slack, sums};
  Mismatch result{0, ~0ull, 0, 0, 0, {}, {}};
  CHECK_CUDA(cudaMemcpy(result_, &result, sizeof(result), cudaMemcpyHostToDevice));
  CompareAll<<<kBlocks, kThreads>>>(check, out_elements_, backward ? c.in_features : c.out_features,
                                    result_);
  CHECK_CUDA(cudaMemcpy(&result, result_, sizeof(result), cudaMemcpyDeviceToHost));
  std::vector<uint8_t> guard(kGuardBytes);
  CHECK_CUDA(cudaMemcpy(guard.data(), static_cast<uint8_t*>(out_) + out_bytes_, kGuardBytes,
                        cudaMemcpyDeviceToHost));
  for (const uint8_t byte : guard) result.count += byte != 0xFF;
  return result;
}

unsigned long long Data::RunTwiceAndDiffer(cudaStream_t stream) {
  void* before = Allocate(out_bytes_);
  CHECK_CUDA(cudaMemcpyAsync(before, out_, out_bytes_, cudaMemcpyDeviceToDevice, stream));
  CHECK_CUDA(cudaMemsetAsync(out_, 0xFF, out_bytes_, stream));
  Transpose(stream);
  CHECK_CUDA(Launch(stream));
  return Differ(stream, before);
}

unsigned long long Data::RunAsInBlocks(cudaStream_t stream) {
  if (case_.clear_slack) return 0;  // these products do not ask for it
  void* before = Allocate(out_bytes_);
  void* poison = Allocate(out_bytes_);
  CHECK_CUDA(cudaMemcpy(before, out_, out_bytes_, cudaMemcpyDeviceToDevice));
  CHECK_CUDA(cudaMemset(poison, 0xFF, out_bytes_));
  Poison();
  CHECK_CUDA(Launch(stream, Upload(std::vector<int32_t>{0})));
  unsigned long long wrong = Differ(stream, poison);
  if (case_.product != GemmProduct::kWeightGrad) return wrong;
  FillOutput(0, 0);
  CHECK_CUDA(Launch(stream, Upload(std::vector<int32_t>{1}), /*adds=*/true));
  return wrong + Differ(stream, before);
}

// Counts bytes of the output that differ from `want`.
unsigned long long Data::Differ(cudaStream_t stream, const void* want) {
  auto* count = static_cast<unsigned long long*>(Allocate(8));
  CHECK_CUDA(cudaMemsetAsync(count, 0, 8, stream));
  CountDifferent<<<kBlocks, kThreads, 0, stream>>>(static_cast<const uint8_t*>(want),
                                                   static_cast<uint8_t*>(out_), out_bytes_, count);
  unsigned long long different = 0;
  CHECK_CUDA(cudaMemcpyAsync(&different, count, 8, cudaMemcpyDeviceToHost, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  return different;
}

}  // namespace gemm_test
