// Sums that are sent as 8-bit floats, rounded as in `ops/quantize/rounding.py`. row_ops_impl.h
// includes this file in its namespace, once per instruction set.
//
// A sum is stored as its e4m3 data, padded to a multiple of 4 bytes, then an f32 scale for each
// kFp8Block values. Loops have no branches, so that compilers vectorize them.

constexpr float kLargestFp8 = 448.0f;
constexpr uint32_t kSmallestBits = 0x00800000u;  // bits of 2^-126: smaller values count as 0
constexpr uint32_t kInfinityBits = 0x7F800000u;

// Rounds to nearest even and saturates. Infinities become NaNs, because e4m3 has no infinities.
inline uint8_t ToFp8(float x, float inverse_scale) {
  const uint32_t bits = BitsOf(x), size_bits = bits & 0x7FFFFFFFu;
  const bool finite = size_bits < kInfinityBits;
  const bool counts = finite && size_bits >= kSmallestBits;
  float size = FloatOf(counts ? size_bits : 0) * inverse_scale;
  size = size < kLargestFp8 ? size : kLargestFp8;
  const uint32_t raw = BitsOf(size);
  const uint32_t normal = ((raw + 0x7FFFF + (raw >> 20 & 1)) >> 20) - (120 << 3);
  // f32 values near 2^14 are as far apart as e4m3's values below 2^-6, so this addition rounds to
  // e4m3's values.
  const uint32_t small = BitsOf(size + 16384.0f) - BitsOf(16384.0f);
  const uint32_t code = size < 0.015625f ? small : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80) | (finite ? code : 0x7F));
}

inline float FromFp8(uint8_t code, float scale) {
  const uint32_t size = code & 0x7Fu;
  const float normal = FloatOf((size << 20) + (120u << 23));
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0.001953125f;  // 2^-9
  float value = size < 8 ? small : normal;
  value = size == 0x7F ? FloatOf(0x7FC00000u) : value;
  return ((code & 0x80) != 0 ? -value : value) * scale;
}

inline float ScaleOf(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t size = BitsOf(x[i]) & 0x7FFFFFFFu;
    size = size < kInfinityBits ? size : 0;
    largest = size > largest ? size : largest;
  }
  if (largest < kSmallestBits) return 1.0f;
  const float scale = FloatOf(largest) / kLargestFp8, smallest = FloatOf(kSmallestBits);
  return scale < smallest ? smallest : scale;
}

// ReduceFn for rows of type In, with the sum as 8-bit floats.
template <typename In>
void ReduceToFp8(void* dst, const void* const* rows, const float* weights, int64_t count,
                 int64_t width) {
  auto* data = static_cast<uint8_t*>(dst);
  auto* scales = reinterpret_cast<float*>(data + Fp8ScalesAt(width));
  alignas(64) float sum[kFp8Block];
  for (int64_t start = 0; start < width; start += kFp8Block) {
    const int64_t columns = width - start < kFp8Block ? width - start : kFp8Block;
    SumColumns<In>(sum, rows, weights, count, start, columns);
    const float scale = ScaleOf(sum, columns);
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < columns; ++i) data[start + i] = ToFp8(sum[i], inverse);
    scales[start / kFp8Block] = scale;
  }
}

// ReduceFn for 8-bit sums, without weights, with the result in type Out.
template <typename Out>
void ReduceFromFp8(void* dst, const void* const* rows, const float*, int64_t count, int64_t width) {
  auto* out = static_cast<typename Out::Storage*>(dst);
  alignas(64) float sum[kFp8Block];
  for (int64_t start = 0; start < width; start += kFp8Block) {
    const int64_t columns = width - start < kFp8Block ? width - start : kFp8Block;
    for (int64_t i = 0; i < columns; ++i) sum[i] = 0;
    for (int64_t r = 0; r < count; ++r) {
      const auto* data = static_cast<const uint8_t*>(rows[r]);
      const float scale =
          reinterpret_cast<const float*>(data + Fp8ScalesAt(width))[start / kFp8Block];
      for (int64_t i = 0; i < columns; ++i) sum[i] += FromFp8(data[start + i], scale);
    }
    for (int64_t i = 0; i < columns; ++i) out[start + i] = Out::Store(sum[i]);
  }
}
