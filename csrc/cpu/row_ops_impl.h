// Body of RowOps, included by one file per instruction set, each in an anonymous namespace. It
// includes no standard C++ header with inline functions: the linker could keep the copy made for
// a newer processor than the one it then runs on.

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#include "cpu/row_ops.h"

namespace ep_runtime {
namespace {

struct F32 {
  using Storage = float;
  using Wide = float;
  static Wide Load(Storage x) { return x; }
  static Storage Store(Wide x) { return x; }
};

struct F64 {
  using Storage = double;
  using Wide = double;
  static Wide Load(Storage x) { return x; }
  static Storage Store(Wide x) { return x; }
};

struct F16 {
  using Storage = _Float16;
  using Wide = float;
  static Wide Load(Storage x) { return static_cast<float>(x); }
  static Storage Store(Wide x) { return static_cast<_Float16>(x); }
};

struct BF16 {
  using Storage = uint16_t;
  using Wide = float;
  static Wide Load(Storage x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static Storage Store(Wide x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const uint32_t nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : nearest_even);
  }
};

// The same element type, wide: partial sums between ranks.
template <typename T>
struct WideOf {
  using Storage = typename T::Wide;
  using Wide = typename T::Wide;
  static Wide Load(Storage x) { return x; }
  static Storage Store(Wide x) { return x; }
};

// Columns that are summed at a time: the accumulators stay in the first-level cache.
constexpr int64_t kBlock = 512;

template <typename In, typename Out>
void Reduce(void* dst, const void* const* rows, const float* weights, int64_t count,
            int64_t width) {
  using Wide = typename In::Wide;
  auto* out = static_cast<typename Out::Storage*>(dst);
  alignas(64) Wide sum[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t columns = width - start < kBlock ? width - start : kBlock;
    for (int64_t i = 0; i < columns; ++i) sum[i] = 0;
    for (int64_t r = 0; r < count; ++r) {
      const auto* row = static_cast<const typename In::Storage*>(rows[r]) + start;
      if (weights == nullptr) {
        for (int64_t i = 0; i < columns; ++i) sum[i] += In::Load(row[i]);
      } else {
        const Wide weight = weights[r];
        for (int64_t i = 0; i < columns; ++i) sum[i] += weight * In::Load(row[i]);
      }
    }
    for (int64_t i = 0; i < columns; ++i) out[start + i] = Out::Store(sum[i]);
  }
}

template <typename T>
void Scale(void* dst, const void* src, float weight, int64_t width) {
  auto* out = static_cast<typename T::Storage*>(dst);
  const auto* in = static_cast<const typename T::Storage*>(src);
  const typename T::Wide wide = weight;
  for (int64_t i = 0; i < width; ++i) out[i] = T::Store(wide * T::Load(in[i]));
}

template <typename T>
float Dot(const void* a, const void* b, void* scratch, int64_t width) {
  using Wide = typename T::Wide;
  const auto* x = static_cast<const typename T::Storage*>(a);
  const auto* y = static_cast<const typename T::Storage*>(b);
  auto* sum = static_cast<Wide*>(scratch);
  if (width == 1) return static_cast<float>(T::Load(x[0]) * T::Load(y[0]));
  // The first level makes the products on the way, so the scratch is half a row.
  int64_t half = (width + 1) / 2;
  const int64_t pairs = width - half;
  for (int64_t i = 0; i < pairs; ++i) {
    sum[i] = T::Load(x[i]) * T::Load(y[i]) + T::Load(x[half + i]) * T::Load(y[half + i]);
  }
  if (pairs < half) sum[pairs] = T::Load(x[pairs]) * T::Load(y[pairs]);
  for (int64_t left = half; left > 1; left = half) {
    half = (left + 1) / 2;
    for (int64_t i = 0; i < left - half; ++i) sum[i] += sum[half + i];
  }
  return static_cast<float>(sum[0]);
}

#if defined(__SSE2__)
void Stream(void* dst, const void* src, int64_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
#if defined(__AVX512F__)
  using Vector = __m512i;
  const auto move = [](char* t, const char* f) {
    _mm512_stream_si512(reinterpret_cast<Vector*>(t), _mm512_loadu_si512(f));
  };
#elif defined(__AVX2__)
  using Vector = __m256i;
  const auto move = [](char* t, const char* f) {
    _mm256_stream_si256(reinterpret_cast<Vector*>(t),
                        _mm256_loadu_si256(reinterpret_cast<const Vector*>(f)));
  };
#else
  using Vector = __m128i;
  const auto move = [](char* t, const char* f) {
    _mm_stream_si128(reinterpret_cast<Vector*>(t),
                     _mm_loadu_si128(reinterpret_cast<const Vector*>(f)));
  };
#endif
  constexpr int64_t kStep = sizeof(Vector);
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kStep - 1));
  if (head > bytes) head = bytes;
  memcpy(to, from, head);
  int64_t at = head;
  for (; at + kStep <= bytes; at += kStep) move(to + at, from + at);
  memcpy(to + at, from + at, bytes - at);
}
#else
void Stream(void* dst, const void* src, int64_t bytes) { memcpy(dst, src, bytes); }
#endif

constexpr RowOps kRowOps = {
    {Reduce<F32, F32>, Reduce<BF16, BF16>, Reduce<F16, F16>, Reduce<F64, F64>},
    {Reduce<F32, F32>, Reduce<BF16, WideOf<BF16>>, Reduce<F16, WideOf<F16>>, Reduce<F64, F64>},
    {Reduce<F32, F32>, Reduce<WideOf<BF16>, BF16>, Reduce<WideOf<F16>, F16>, Reduce<F64, F64>},
    {Scale<F32>, Scale<BF16>, Scale<F16>, Scale<F64>},
    {Dot<F32>, Dot<BF16>, Dot<F16>, Dot<F64>},
    Stream,
};

}  // namespace
}  // namespace ep_runtime
