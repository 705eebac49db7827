#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "gemm_case.h"

namespace gemm_test {
namespace {

constexpr int kGuardBytes = 4096;  // after the output: nobody's

__host__ __device__ inline int BytesOf(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

__device__ inline uint32_t Hash(uint64_t index, uint32_t seed) {
  uint32_t x = static_cast<uint32_t>(index) * 0x9E3779B1u ^
               static_cast<uint32_t>(index >> 32) * 0x85EBCA77u ^ seed * 0xC2B2AE3Du;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

__device__ inline float NormalAt(uint64_t index, uint32_t seed) {
  const float u = (Hash(index, seed) + 1.0f) * 2.3283064e-10f;
  const float v = Hash(index, seed + 77) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

__device__ inline void StoreFloat(void* data, FloatType type, int64_t i, float value) {
  if (type == FloatType::kBF16) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
  if (type == FloatType::kF16) static_cast<__half*>(data)[i] = __float2half(value);
  if (type == FloatType::kF32) static_cast<float*>(data)[i] = value;
}

__device__ inline float LoadFloat(const void* data, FloatType type, int64_t i) {
  if (type == FloatType::kBF16) return static_cast<const __nv_bfloat16*>(data)[i];
  if (type == FloatType::kF16) return static_cast<const __half*>(data)[i];
  return static_cast<const float*>(data)[i];
}

// Normal values; NaN in rows of no group.
__global__ void Fill(void* data, FloatType type, int64_t rows, int64_t width, uint32_t seed,
                     float scale, const int* row_expert) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * width; i += step) {
    const bool slack = row_expert != nullptr && row_expert[i / width] < 0;
    StoreFloat(data, type, i, slack ? nanf("") : scale * NormalAt(i, seed));
  }
}

struct Check {
  GemmProduct product;
  FloatType type, out_type;
  int64_t rows;
  int in_features, out_features, experts, groups;
  const void *lhs, *rhs, *bias, *out;
  const int *row_expert, *starts, *sizes;
  bool clear_slack;
};

struct Sum {
  double value = 0;
  double size = 0;
  __device__ void Add(float a, float b) {
    value += static_cast<double>(a) * b;
    size += fabs(static_cast<double>(a) * b);
  }
};

// `width` is of an output row. Returns whether somebody owns the element.
__device__ inline bool Expect(const Check& c, int64_t row, int column, Sum* sum) {
  const int64_t k_count = c.in_features, n_count = c.out_features;
  if (c.product == GemmProduct::kWeightGrad) {
    const int expert = static_cast<int>(row / k_count);
    const int64_t feature = row % k_count;
    for (int g = expert; g < c.groups; g += c.experts) {
      for (int64_t r = c.starts[g]; r < c.starts[g] + c.sizes[g]; ++r) {
        sum->Add(LoadFloat(c.lhs, c.type, r * k_count + feature),
                 LoadFloat(c.rhs, c.type, r * n_count + column));
      }
    }
    return true;
  }
  const int expert = c.row_expert[row];
  if (expert < 0) return false;
  const bool forward = c.product == GemmProduct::kForward;
  const int64_t depth = forward ? k_count : n_count;
  for (int64_t d = 0; d < depth; ++d) {
    const int64_t at = forward ? (expert * k_count + d) * n_count + column
                               : (expert * k_count + column) * n_count + d;
    sum->Add(LoadFloat(c.lhs, c.type, row * depth + d), LoadFloat(c.rhs, c.type, at));
  }
  if (c.bias != nullptr) {
    const float bias = LoadFloat(c.bias, FloatType::kF32, expert * n_count + column);
    sum->value += bias;
    sum->size += fabs(static_cast<double>(bias));
  }
  return true;
}

// What is there where no group has a row: zeros, or the poison from before.
__device__ inline bool IsSlack(const Check& c, int64_t i) {
  const uint32_t want = c.clear_slack ? 0 : 0xFFFFFFFFu;
  if (c.out_type == FloatType::kF32) return static_cast<const uint32_t*>(c.out)[i] == want;
  return static_cast<const uint16_t*>(c.out)[i] == static_cast<uint16_t>(want);
}

__global__ void CompareAll(Check c, int64_t elements, int width, int64_t stride, Mismatch* result) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i * stride < elements;
       i += step) {
    // Spread over tiles: neighbours in the sample are a prime's distance apart.
    const int64_t at = stride == 1 ? i : (i * stride + Hash(i, 5) % stride) % elements;
    Sum sum;
    const bool owned = Expect(c, at / width, static_cast<int>(at % width), &sum);
    const float got = LoadFloat(c.out, c.out_type, at);
    const double rounding = c.out_type == FloatType::kF32    ? 0
                            : c.out_type == FloatType::kBF16 ? 1.0 / 256
                                                             : 1.0 / 2048;
    const double tolerance = rounding * fabs(sum.value) + 1e-5 * sum.size + 1e-7;
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
  layout.row_expert.assign(c.rows(), -1);
  const int groups = c.groups_per_slab();
  for (int slab = 0; slab < c.slabs; ++slab) {
    int start = 0;
    for (int g = 0; g < groups; ++g) {
      const int group = slab * groups + g;
      const int size = std::min(c.sizes[group], c.slab_rows - start);
      layout.starts.push_back(slab * c.slab_rows + start);
      layout.sizes.push_back(size);
      for (int r = 0; r < size; ++r) {
        layout.row_expert[int64_t{slab} * c.slab_rows + start + r] = group % c.experts;
      }
      start += size;
      layout.total += size;
    }
  }
  return layout;
}

Data::Data(const GemmCase& c) : case_(c), layout_(LayOut(c)) {
  const bool by_expert = c.product == GemmProduct::kWeightGrad;
  const bool backward = c.product == GemmProduct::kDataGrad;
  const int64_t rows = c.rows(), in = c.in_features, out = c.out_features;
  const int64_t lhs_width = backward ? out : in;
  const int64_t rhs_rows = by_expert ? rows : c.experts * in;
  out_elements_ = by_expert ? c.experts * in * out : rows * (backward ? in : out);
  out_bytes_ = out_elements_ * BytesOf(c.out_type);
  const auto upload = [&](const std::vector<int>& values) {
    auto* to = static_cast<int*>(Allocate(values.size() * sizeof(int)));
    CHECK_CUDA(cudaMemcpy(to, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice));
    return to;
  };
  sizes_ = upload(c.sizes);
  row_expert_ = upload(layout_.row_expert);
  starts_ = upload(layout_.starts);
  clipped_ = upload(layout_.sizes);
  lhs_ = Allocate(rows * lhs_width * BytesOf(c.type));
  rhs_ = Allocate(rhs_rows * out * BytesOf(c.type));
  out_ = Allocate(out_bytes_ + kGuardBytes);
  result_ = static_cast<Mismatch*>(Allocate(sizeof(Mismatch)));
  Fill<<<kBlocks, kThreads>>>(lhs_, c.type, rows, lhs_width, 1, 1.0f, row_expert_);
  Fill<<<kBlocks, kThreads>>>(rhs_, c.type, rhs_rows, out, 2, 1.0f,
                              by_expert ? row_expert_ : nullptr);
  if (c.bias) {
    bias_ = Allocate(c.experts * out * 4);
    Fill<<<kBlocks, kThreads>>>(bias_, FloatType::kF32, c.experts, out, 3, 8.0f, nullptr);
  }
  Poison();
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

ec::GroupedGemmParams Data::Params() const {
  const GemmCase& c = case_;
  return {
      c.product, c.type,          c.out_type,     c.slabs,       c.slab_rows, c.groups_per_slab(),
      c.experts, c.in_features,   c.out_features, sizes_,        lhs_,        rhs_,
      bias_,     FloatType::kF32, out_,           c.clear_slack, c.tuning};
}

void Data::Poison() { CHECK_CUDA(cudaMemset(out_, 0xFF, out_bytes_ + kGuardBytes)); }

Mismatch Data::Compare(int64_t stride) {
  const GemmCase& c = case_;
  const bool backward = c.product == GemmProduct::kDataGrad;
  const Check check{c.product,     c.type,         c.out_type, c.rows(),
                    c.in_features, c.out_features, c.experts,  static_cast<int>(c.sizes.size()),
                    lhs_,          rhs_,           bias_,      out_,
                    row_expert_,   starts_,        clipped_,   c.clear_slack};
  Mismatch result{0, ~0ull, 0, 0, 0, {}, {}};
  CHECK_CUDA(cudaMemcpy(result_, &result, sizeof(result), cudaMemcpyHostToDevice));
  CompareAll<<<kBlocks, kThreads>>>(check, out_elements_, backward ? c.in_features : c.out_features,
                                    stride, result_);
  CHECK_CUDA(cudaMemcpy(&result, result_, sizeof(result), cudaMemcpyDeviceToHost));
  std::vector<uint8_t> guard(kGuardBytes);
  CHECK_CUDA(cudaMemcpy(guard.data(), static_cast<uint8_t*>(out_) + out_bytes_, kGuardBytes,
                        cudaMemcpyDeviceToHost));
  for (const uint8_t byte : guard) result.count += byte != 0xFF;
  return result;
}

unsigned long long Data::RunTwiceAndDiffer(cudaStream_t stream) {
  auto* before = static_cast<uint8_t*>(Allocate(out_bytes_));
  auto* count = static_cast<unsigned long long*>(Allocate(8));
  CHECK_CUDA(cudaMemcpyAsync(before, out_, out_bytes_, cudaMemcpyDeviceToDevice, stream));
  CHECK_CUDA(cudaMemsetAsync(out_, 0xFF, out_bytes_, stream));
  CHECK_CUDA(cudaMemsetAsync(count, 0, 8, stream));
  CHECK_CUDA(ec::LaunchGroupedGemm(stream, Params()));
  CountDifferent<<<kBlocks, kThreads, 0, stream>>>(before, static_cast<uint8_t*>(out_), out_bytes_,
                                                   count);
  unsigned long long different = 0;
  CHECK_CUDA(cudaMemcpyAsync(&different, count, 8, cudaMemcpyDeviceToHost, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  return different;
}

}  // namespace gemm_test
