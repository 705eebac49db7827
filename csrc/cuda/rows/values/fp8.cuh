// Eight values of a row: their magnitudes, and their conversion to 8-bit floats.
#ifndef EP_RUNTIME_CUDA_ROWS_VALUES_FP8_CUH_
#define EP_RUNTIME_CUDA_ROWS_VALUES_FP8_CUH_

#include <cuda_runtime.h>

#include "cuda/fp8_values.cuh"
#include "cuda/movement/call/row_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace rows {

// A magnitude is a value's bits without the sign; as integers, magnitudes have the order of
// absolute values. For 16-bit types a word has two magnitudes.
template <RowType kType>
struct Magnitude {
  static constexpr bool kPacked = kType != RowType::kF32;
  static constexpr uint32_t kInfinity = kType == RowType::kF32    ? 0x7F800000u
                                        : kType == RowType::kBF16 ? 0x7F80u
                                                                  : 0x7C00u;

  __device__ static uint32_t Of(uint32_t word) { return word & (kPacked ? 0x7FFF7FFFu : ~0u >> 1); }
  // Returns the magnitudes of a word, 0 for values that are not finite.
  __device__ static uint32_t OfFinite(uint32_t word) {
    const uint32_t size = Of(word);
    if (!kPacked) return size < kInfinity ? size : 0u;
    return size & __vcmpltu2(size, kInfinity * 0x10001u);
  }
  __device__ static uint32_t Max(uint32_t a, uint32_t b) {
    return kPacked ? __vmaxu2(a, b) : max(a, b);
  }
  __device__ static uint32_t Single(uint32_t word) {
    return kPacked ? max(word >> 16, word & 0xFFFFu) : word;
  }
  // Converts a single magnitude to a float.
  __device__ static float ToFloat(uint32_t size) {
    if (kType == RowType::kF16) return __half2float(__ushort_as_half(size));
    const float value = __uint_as_float(kPacked ? size << 16 : size);
    return value < kSmallest ? 0.0f : value;
  }
};

template <RowType kType>
struct Piece {
  using M = Magnitude<kType>;
  static constexpr int kValues = 8;
  static constexpr int kWords = kType == RowType::kF32 ? 8 : 4;
  uint32_t words[kWords];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  // Loads the piece at value `index`, a multiple of kValues.
  __device__ void Load(const void* values, int64_t index) {
    const auto* from =
        static_cast<const uint4*>(values) + static_cast<uint64_t>(index) / kValues * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      // The two halves of a sector are loaded one after another, so keep the sector in L1.
      const uint4 v = kWords == 4 ? LoadStream(from) : __ldg(from + i);
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  }
  __device__ void Unpack(float* x) const {
    using E = Element<kType>;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 v =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
      E::Unpack(v, x + i * E::kPerVector);
    }
  }
  __device__ uint32_t Largest() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) largest = M::Max(largest, M::Of(words[i]));
    return M::Single(largest);
  }
  __device__ uint32_t LargestFinite() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) largest = M::Max(largest, M::OfFinite(words[i]));
    return M::Single(largest);
  }
};

// Converts the values; `inverse(i)` is 1 / scale of value i.
template <RowType kType, Fp8Format kFormat, typename Inverse>
__device__ __forceinline__ uint2 Convert(const Piece<kType>& piece, Inverse inverse) {
  using F = Fp8<kFormat>;
  float x[8];
  piece.Unpack(x);
  uint32_t bytes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = MultiplyFlushed(x[4 * half + i], inverse(4 * half + i));
    bytes[half] = F::Pair(y[0], y[1]) | F::Pair(y[2], y[3]) << 16;
  }
  if (piece.Largest() >= Magnitude<kType>::kInfinity) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (isfinite(x[i])) continue;
      const int shift = i % 4 * 8;
      bytes[i / 4] = (bytes[i / 4] & ~(0xFFu << shift)) | F::NotFinite(x[i]) << shift;
    }
  }
  return make_uint2(bytes[0], bytes[1]);
}

__device__ __forceinline__ void StorePiece(uint8_t* data, int64_t index, const uint2& bytes) {
  *reinterpret_cast<uint2*>(data + index) = bytes;
}

// All blocks with one blockIdx.y fill bytes `from` to `end` - 1, both multiples of 8, with the low
// byte of `byte`.
__device__ __forceinline__ void Fill(uint8_t* data, int64_t from, int64_t end, uint32_t byte) {
  const uint32_t word = byte * 0x01010101u;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  // Vectors must be 16-byte aligned, so half a vector may be left at either end.
  const int64_t first = (from + 15) / 16, last = end / 16;
  auto* vectors = reinterpret_cast<uint4*>(data);
  for (int64_t i = first + thread; i < last; i += step) {
    vectors[i] = make_uint4(word, word, word, word);
  }
  if (thread != 0) return;
  if (from % 16 != 0 && from < end) StorePiece(data, from, make_uint2(word, word));
  if (end % 16 != 0 && from < end) StorePiece(data, end - 8, make_uint2(word, word));
}

}  // namespace rows
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_VALUES_FP8_CUH_
