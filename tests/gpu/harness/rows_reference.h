// Expected results of kernels that visit rows: 8-bit floats by tables, activations in f64.
#ifndef EP_RUNTIME_TESTS_GPU_ROWS_REFERENCE_H_
#define EP_RUNTIME_TESTS_GPU_ROWS_REFERENCE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/rows/activation.h"
#include "cuda/rows/quantize.h"

namespace rows_test {

namespace ec = ep_runtime::cuda;
using ec::ActivationFunction;
using ec::Fp8Format;
using ec::RowType;

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// A host array of one of the float types.
class Floats {
 public:
  Floats(RowType type, int64_t count) : type_(type), bytes_(count * width()) {}
  Floats(RowType type, std::vector<uint8_t> bytes) : type_(type), bytes_(std::move(bytes)) {}

  int width() const { return type_ == RowType::kF32 ? 4 : 2; }
  RowType type() const { return type_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  float at(int64_t i) const {
    if (type_ == RowType::kF32) return reinterpret_cast<const float*>(bytes_.data())[i];
    const uint16_t half = reinterpret_cast<const uint16_t*>(bytes_.data())[i];
    if (type_ == RowType::kBF16) return FromBits(uint32_t{half} << 16);
    __half_raw raw;
    raw.x = half;
    return __half2float(__half(raw));
  }
  void set(int64_t i, float x) {
    if (type_ == RowType::kF32) {
      reinterpret_cast<float*>(bytes_.data())[i] = x;
      return;
    }
    const uint16_t half = type_ == RowType::kBF16
                              ? static_cast<__nv_bfloat16_raw>(__float2bfloat16(x)).x
                              : static_cast<__half_raw>(__float2half(x)).x;
    reinterpret_cast<uint16_t*>(bytes_.data())[i] = half;
  }

 private:
  RowType type_;
  std::vector<uint8_t> bytes_;
};

// CPUs run with denormals off.
inline float Flushed(float x) {
  return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}

inline float LargestOf(Fp8Format format) { return format == Fp8Format::kE4M3 ? 448.0f : 57344.0f; }

// Value of a byte without its sign, up to the largest.
inline double Decoded(int code, Fp8Format format) {
  const int mantissa_bits = format == Fp8Format::kE4M3 ? 3 : 2;
  const int bias = format == Fp8Format::kE4M3 ? 7 : 15;
  const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// Rounds to nearest, ties to even, and saturates.
inline uint8_t Rounded(float x, Fp8Format format) {
  const int last = format == Fp8Format::kE4M3 ? 0x7E : 0x7B;
  const double size = std::fabs(static_cast<double>(x));
  int low = 0, high = last;
  while (low < high) {  // finds the first code that is not below
    const int middle = (low + high) / 2;
    if (Decoded(middle, format) < size) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low > 0 && size < Decoded(low, format)) {
    const double up = Decoded(low, format) - size, down = size - Decoded(low - 1, format);
    if (down < up || (down == up && low % 2 == 1)) --low;
  }
  return static_cast<uint8_t>(low | (std::signbit(x) ? 0x80 : 0));
}

inline uint8_t Quantized(float x, float scale, Fp8Format format) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return static_cast<uint8_t>(sign | (format == Fp8Format::kE4M3 ? 0x7F : 0x7E));
  if (std::isinf(x)) return static_cast<uint8_t>(sign | (format == Fp8Format::kE4M3 ? 0x7F : 0x7C));
  return Rounded(Flushed(Flushed(x) * (1.0f / scale)), format);
}

// Scale for an amax over finite values.
inline float ScaleOf(float amax, Fp8Format format, bool power_of_two) {
  const float smallest = std::ldexp(1.0f, -126);
  if (amax < smallest) return 1.0f;
  if (!power_of_two) return std::max(amax / LargestOf(format), smallest);
  int exponent;
  const double ratio = std::frexp(static_cast<double>(amax) / LargestOf(format), &exponent);
  return std::ldexp(1.0f, std::max(ratio == 0.5 ? exponent - 1 : exponent, -126));
}

struct Amax {
  float value = 0;
  void Add(float x) {
    if (std::isfinite(x)) value = std::max(value, Flushed(std::fabs(x)));
  }
};

inline uint8_t ExponentByte(float power_of_two) {
  return static_cast<uint8_t>(BitsOf(power_of_two) >> 23);
}

// Computes f and f' in f64.
inline void Activate(ActivationFunction function, double x, double* value, double* slope) {
  const auto logistic = [](double v) { return 1 / (1 + std::exp(-v)); };
  switch (function) {
    case ActivationFunction::kSilu: {
      const double s = logistic(x);
      *value = x * s;
      *slope = s + x * s * (1 - s);
      return;
    }
    case ActivationFunction::kGelu: {
      const double root = std::sqrt(2 / M_PI), cubic = 0.044715;
      const double t = std::tanh(root * (x + cubic * x * x * x));
      *value = 0.5 * x * (1 + t);
      *slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * cubic * x * x);
      return;
    }
    case ActivationFunction::kRelu:
      *value = x > 0 ? x : 0;
      *slope = x > 0;
      return;
    case ActivationFunction::kSquaredRelu:
      *value = x > 0 ? x * x : 0;
      *slope = x > 0 ? 2 * x : 0;
      return;
    case ActivationFunction::kSigmoid:
      *value = logistic(x);
      *slope = *value * (1 - *value);
      return;
    case ActivationFunction::kTanh:
      *value = std::tanh(x);
      *slope = 1 - *value * *value;
      return;
    case ActivationFunction::kLinear:
      *value = x;
      *slope = 1;
      return;
  }
}

}  // namespace rows_test

#endif  // EP_RUNTIME_TESTS_GPU_ROWS_REFERENCE_H_
