// Body of RowOps. One file per instruction set includes it, each in an anonymous namespace. It
// includes no standard C++ header with inline functions, because the linker could keep a copy
// compiled for a newer processor than the library runs on.

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#include "cpu/row_ops.h"

namespace ep_runtime {
namespace {

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float FloatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

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
  static Wide Load(Storage x) { return FloatOf(static_cast<uint32_t>(x) << 16); }
  static Storage Store(Wide x) {
    const uint32_t bits = BitsOf(x);
    const uint32_t nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : nearest_even);
  }
};

// Type of partial sums between ranks, for rows of type T.
template <typename T>
struct WideOf {
  using Storage = typename T::Wide;
  using Wide = typename T::Wide;
  static Wide Load(Storage x) { return x; }
  static Storage Store(Wide x) { return x; }
};

// Adds one row to a sum. The product is rounded before it is added.
template <typename In>
inline typename In::Wide Add(typename In::Wide sum, typename In::Storage x, const float* weight) {
  if (weight == nullptr) return sum + In::Load(x);
  const typename In::Wide wide = *weight;
  return sum + wide * In::Load(x);
}

// Sums a known number of rows: every column stays in a register.
template <typename In, typename Out, int kCount, bool kWeighted>
void ReduceSome(typename Out::Storage* __restrict out, const void* const* rows,
                const float* weights, int64_t width) {
  const typename In::Storage* row[kCount];
  float weight[kCount];
  for (int r = 0; r < kCount; ++r) {
    row[r] = static_cast<const typename In::Storage*>(rows[r]);
    weight[r] = kWeighted ? weights[r] : 1.0f;
  }
  for (int64_t i = 0; i < width; ++i) {
    typename In::Wide sum = 0;
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      sum = Add<In>(sum, row[r][i], kWeighted ? &weight[r] : nullptr);
    }
    out[i] = Out::Store(sum);
  }
}

// Sums some neighbouring columns of any number of rows.
template <typename In>
inline void SumColumns(typename In::Wide* __restrict sum, const void* const* rows,
                       const float* weights, int64_t count, int64_t start, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) sum[i] = 0;
  for (int64_t r = 0; r < count; ++r) {
    const auto* row = static_cast<const typename In::Storage*>(rows[r]) + start;
    const float* weight = weights == nullptr ? nullptr : weights + r;
    if (weight == nullptr) {
      for (int64_t i = 0; i < columns; ++i) sum[i] = Add<In>(sum[i], row[i], nullptr);
    } else {
      for (int64_t i = 0; i < columns; ++i) sum[i] = Add<In>(sum[i], row[i], weight);
    }
  }
}

// Columns summed at a time, so few that the accumulators stay in the first-level cache.
constexpr int64_t kBlock = 512;

template <typename In, typename Out>
void ReduceMany(typename Out::Storage* __restrict out, const void* const* rows,
                const float* weights, int64_t count, int64_t width) {
  using Wide = typename In::Wide;
  alignas(64) Wide sum[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t columns = width - start < kBlock ? width - start : kBlock;
    SumColumns<In>(sum, rows, weights, count, start, columns);
    for (int64_t i = 0; i < columns; ++i) out[start + i] = Out::Store(sum[i]);
  }
}

// Computes the sum of one row: the row itself, with 0 for -0 and subnormals, and with quiet NaNs.
template <typename T>
void CopySum(typename T::Storage* __restrict out, const void* row, int64_t width) {
  const auto* in = static_cast<const typename T::Storage*>(row);
  for (int64_t i = 0; i < width; ++i) out[i] = T::Store(T::Load(in[i]) + 0);
}
template <>
void CopySum<BF16>(uint16_t* __restrict out, const void* row, int64_t width) {
  const auto* in = static_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < width; ++i) {
    const uint16_t x = in[i];
    const uint16_t quiet = (x & 0x7FFF) > 0x7F80 ? 0x40 : 0;
    out[i] = static_cast<uint16_t>((x & 0x7F80) == 0 ? 0 : x | quiet);
  }
}

template <typename In, typename Out, bool kWeighted>
void ReduceCounted(typename Out::Storage* out, const void* const* rows, const float* weights,
                   int64_t count, int64_t width) {
  switch (count) {
#define EP_RUNTIME_REDUCE(n) \
  case n:                    \
    return ReduceSome<In, Out, n, kWeighted>(out, rows, weights, width)
    EP_RUNTIME_REDUCE(1);
    EP_RUNTIME_REDUCE(2);
    EP_RUNTIME_REDUCE(3);
    EP_RUNTIME_REDUCE(4);
    EP_RUNTIME_REDUCE(5);
    EP_RUNTIME_REDUCE(6);
    EP_RUNTIME_REDUCE(7);
    EP_RUNTIME_REDUCE(8);
#undef EP_RUNTIME_REDUCE
    default:
      return ReduceMany<In, Out>(out, rows, weights, count, width);
  }
}

template <typename A, typename B>
struct IsSame {
  static constexpr bool kValue = false;
};
template <typename A>
struct IsSame<A, A> {
  static constexpr bool kValue = true;
};

template <typename In, typename Out>
void Reduce(void* dst, const void* const* rows, const float* weights, int64_t count,
            int64_t width) {
  auto* out = static_cast<typename Out::Storage*>(dst);
  if (weights != nullptr) return ReduceCounted<In, Out, true>(out, rows, weights, count, width);
  if constexpr (IsSame<In, Out>::kValue) {
    if (count == 1) return CopySum<In>(out, rows[0], width);
  }
  ReduceCounted<In, Out, false>(out, rows, nullptr, count, width);
}

#include "cpu/fp8_sums_impl.h"

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
  // The first level multiplies and adds, so the scratch holds only half a row.
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
    {ReduceToFp8<F32>, ReduceToFp8<BF16>, ReduceToFp8<F16>, nullptr},
    {ReduceFromFp8<F32>, ReduceFromFp8<BF16>, ReduceFromFp8<F16>, nullptr},
    {Scale<F32>, Scale<BF16>, Scale<F16>, Scale<F64>},
    {Dot<F32>, Dot<BF16>, Dot<F16>, Dot<F64>},
    Stream,
};

}  // namespace
}  // namespace ep_runtime
