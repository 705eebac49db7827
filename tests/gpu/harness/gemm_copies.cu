// Checks the copies that products need.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <type_traits>

#include "cuda/gemm/copies/dequantize.h"
#include "cuda/gemm/copies/transpose.h"
#include "gemm_case.h"
#include "gemm_copies.h"

namespace gemm_test {
namespace {

using ec::gemm::Groups;
using ec::gemm::PaddedSlabRows;
using ec::gemm::PadRows;

constexpr uint8_t kPoison = 0xFF;

// Device memory with a copy on the host.
template <typename T>
class Mirror {
 public:
  explicit Mirror(std::vector<T> values) : host(std::move(values)) {
    CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(16, bytes())));
    CHECK_CUDA(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~Mirror() { cudaFree(device); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  size_t bytes() const { return host.size() * sizeof(T); }
  std::vector<T> Read() const {
    std::vector<T> values(host.size());
    CHECK_CUDA(cudaMemcpy(values.data(), device, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

  std::vector<T> host;
  T* device = nullptr;
};

std::vector<uint8_t> RandomBytes(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

struct RowCase {
  int slabs;
  int slab_rows;
  int width;
  std::vector<int> sizes;  // [slabs * groups]
};

const std::vector<RowCase>& RowCases() {
  static std::vector<int> many(70, 3);
  static const std::vector<RowCase> cases = {
      {1, 128, 16, {128}},
      {1, 300, 144, {1, 127, 0, 129, 20}},
      {2, 200, 272, {0, 33, 167, 200, 0, 5}},
      {1, 256, 128, {200, 300, 7}},
      {2, 40, 1040, {10, 0, 0, 0}},
      {1, 500, 32, many},
  };
  return cases;
}

Groups GroupsOf(const RowCase& c, const int32_t* sizes) {
  const int groups = static_cast<int>(c.sizes.size());
  return {sizes, groups, groups / c.slabs, groups, c.slab_rows};
}

bool Say(const char* what, int number, size_t different) {
  if (different > 0) std::printf("FAILED  %s %d: %zu differ\n", what, number, different);
  return different == 0;
}

template <typename T>
size_t CountDifferent(const std::vector<T>& got, const std::vector<T>& want) {
  size_t count = 0;
  for (size_t i = 0; i < want.size(); ++i) count += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  return count;
}

// Values with random bits.
template <typename T>
std::vector<T> RandomValues(int64_t count, uint32_t seed) {
  const std::vector<uint8_t> bytes = RandomBytes(count * static_cast<int64_t>(sizeof(T)), seed);
  std::vector<T> values(count);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename T>
using Rows =
    std::conditional_t<sizeof(T) == 1, ec::gemm::TransposedRows, ec::gemm::TransposedFloatRows>;

template <typename T>
bool CheckRows(const RowCase& c, int number) {
  const int groups = static_cast<int>(c.sizes.size()) / c.slabs;
  const int64_t line = PaddedSlabRows(c.slab_rows, groups), pitch = c.slabs * line;
  const Mirror<T> from(RandomValues<T>(int64_t{c.slabs} * c.slab_rows * c.width, number));
  std::vector<T> want(pitch * c.width);
  std::memset(want.data(), kPoison, want.size() * sizeof(T));
  const Mirror<T> to(want);
  const Mirror<int32_t> sizes(c.sizes);
  for (int slab = 0; slab < c.slabs; ++slab) {
    int64_t start = 0, at = slab * line;
    for (int g = 0; g < groups; ++g) {
      const int64_t size =
          std::min<int64_t>(c.sizes[slab * groups + g], int64_t{c.slab_rows} - start);
      for (int64_t r = 0; r < PadRows(static_cast<int32_t>(size)); ++r) {
        for (int64_t k = 0; k < c.width; ++k) {
          const int64_t row = int64_t{slab} * c.slab_rows + start + r;
          want[k * pitch + at + r] = r < size ? from.host[row * c.width + k] : T{0};
        }
      }
      start += size;
      at += PadRows(static_cast<int32_t>(size));
    }
  }
  const Rows<T> copy{GroupsOf(c, sizes.device), from.device, to.device, c.slabs, c.width};
  CHECK_CUDA(ec::gemm::LaunchTranspose(nullptr, copy));
  return Say("transposed rows", number, CountDifferent(to.Read(), want));
}

template <typename T>
bool CheckPlanes(int planes, int lines, int width, int number) {
  const Mirror<T> from(RandomValues<T>(int64_t{planes} * lines * width, number));
  std::vector<T> want(from.host.size());
  std::memset(want.data(), kPoison, want.size() * sizeof(T));
  const Mirror<T> to(want);
  for (int64_t p = 0; p < planes; ++p) {
    for (int64_t l = 0; l < lines; ++l) {
      for (int64_t w = 0; w < width; ++w) {
        want[(p * width + w) * lines + l] = from.host[(p * lines + l) * width + w];
      }
    }
  }
  if constexpr (sizeof(T) == 1) {
    CHECK_CUDA(ec::gemm::LaunchTranspose(
        nullptr, ec::gemm::TransposedPlanes{from.device, to.device, planes, lines, width}));
  } else {
    CHECK_CUDA(ec::gemm::LaunchTranspose(
        nullptr,
        ec::gemm::TransposedFloatPlanes{from.device, to.device, planes, lines, width, width}));
  }
  return Say("transposed planes", number, CountDifferent(to.Read(), want));
}

float Widen(FloatType type, uint8_t byte) {
  const auto kind = type == FloatType::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, kind)));
}

struct ScaleCase {
  FloatType type;
  bool e8m0;
  int line_values;
  int column_values;
};

// Checks rows with groups, or planes without.
bool CheckDequantize(const RowCase& c, const ScaleCase& s, bool grouped, int number) {
  const int64_t scale_lines = (c.slab_rows + s.line_values - 1) / s.line_values;
  const int64_t scale_width = (c.width + s.column_values - 1) / s.column_values;
  const int64_t scales = c.slabs * scale_lines * scale_width;
  const Mirror<uint8_t> from(RandomBytes(int64_t{c.slabs} * c.slab_rows * c.width, number));
  const Mirror<uint8_t> powers(RandomBytes(scales, number + 1));
  std::vector<float> drawn(scales);
  for (int64_t i = 0; i < scales; ++i) drawn[i] = 0.01f * (1 + powers.host[i]);
  const Mirror<float> floats(drawn);
  const Mirror<int32_t> sizes(c.sizes);
  std::vector<uint16_t> want(from.host.size(), 0xFFFF);
  const Mirror<uint16_t> to(want);
  const int groups = static_cast<int>(c.sizes.size()) / c.slabs;
  for (int64_t i = 0; i < static_cast<int64_t>(want.size()); ++i) {
    const int64_t slab = i / c.width / c.slab_rows, line = i / c.width % c.slab_rows;
    int64_t used = 0;
    for (int g = 0; g < groups; ++g) used += c.sizes[slab * groups + g];
    if (grouped && line >= used) continue;
    const int64_t at =
        (slab * scale_lines + line / s.line_values) * scale_width + i % c.width / s.column_values;
    const float power = powers.host[at] == 255 ? NAN : std::ldexp(1.0f, powers.host[at] - 127);
    const float value = Widen(s.type, from.host[i]) * (s.e8m0 ? power : drawn[at]);
    const __nv_bfloat16 rounded = __float2bfloat16(value);
    std::memcpy(&want[i], &rounded, 2);
  }
  ec::gemm::DequantizeParams params{};
  params.groups = GroupsOf(c, grouped ? sizes.device : nullptr);
  params.data = from.device;
  params.type = s.type;
  params.scale = s.e8m0 ? static_cast<const void*>(powers.device) : floats.device;
  params.e8m0 = s.e8m0;
  params.planes = c.slabs;
  params.lines = c.slab_rows;
  params.width = c.width;
  params.line_values = s.line_values;
  params.column_values = s.column_values;
  params.out = to.device;
  CHECK_CUDA(ec::gemm::LaunchDequantize(nullptr, params));
  const std::vector<uint16_t> got = to.Read();
  size_t different = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const bool both_nan = (got[i] & 0x7FFF) > 0x7F80 && (want[i] & 0x7FFF) > 0x7F80;
    const bool poison = want[i] == 0xFFFF || got[i] == 0xFFFF;
    different += got[i] != want[i] && (poison || !both_nan);
  }
  return Say("dequantized", number, different);
}

}  // namespace

int CheckCopies(int* all) {
  const ScaleCase kScales[] = {
      {FloatType::kE4M3, false, 1, 128},   {FloatType::kE5M2, false, 1, 128},
      {FloatType::kE4M3, false, 128, 128}, {FloatType::kE4M3, true, 1, 32},
      {FloatType::kE5M2, true, 32, 1},
  };
  int wrong = 0, number = 0;
  for (const RowCase& c : RowCases()) {
    wrong += !CheckRows<uint8_t>(c, ++number);
    wrong += !CheckRows<float>(c, ++number);
    for (const ScaleCase& s : kScales) {
      wrong += !CheckDequantize(c, s, true, ++number);
      wrong += !CheckDequantize(c, s, false, ++number);
    }
  }
  const int planes[][3] = {{1, 16, 16}, {3, 128, 128}, {2, 144, 272}, {5, 400, 1024}};
  for (const auto& p : planes) {
    wrong += !CheckPlanes<uint8_t>(p[0], p[1], p[2], ++number);
    wrong += !CheckPlanes<float>(p[0], p[1] - 4, p[2] - 4, ++number);
  }
  std::printf("copies: %d of %d cases failed\n", wrong, number);
  *all += number;
  return wrong;
}

}  // namespace gemm_test
