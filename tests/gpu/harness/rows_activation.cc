// Checks activations of rows.
#include "rows_case.h"

namespace rows_test {
namespace {

const RowType kTypes[] = {RowType::kBF16, RowType::kF16, RowType::kF32};
const char* const kFunctions[] = {"silu",    "gelu", "relu",  "squared_relu",
                                  "sigmoid", "tanh", "linear"};

struct ActivationCase {
  Slabs slabs;
  ActivationFunction function;
  RowType type;
  bool gated;
  bool weighted;
  int width;

  std::string name(const char* way) const {
    const char* const types[] = {"f32", "bf16", "f16"};
    return std::string("activation ") + way + " " + kFunctions[static_cast<int>(function)] + " " +
           types[static_cast<int>(type)] + (gated ? " gated" : "") + (weighted ? " weighted" : "") +
           ", " + std::to_string(slabs.slabs) + " x " + std::to_string(slabs.rows) + " rows of " +
           std::to_string(width) + ", " + std::to_string(slabs.used) + " used in " +
           std::to_string(slabs.groups) + " groups";
  }
};

// Slack rows are NaN.
Floats RandomRows(std::mt19937& random, const Slabs& slabs, RowType type, int width) {
  std::normal_distribution<float> normal(0.0f, 2.0f);
  Floats values(type, slabs.all_rows() * width);
  for (int64_t row = 0; row < slabs.all_rows(); ++row) {
    for (int i = 0; i < width; ++i) {
      values.set(row * width + i, slabs.owner[row] < 0 ? std::nanf("") : normal(random));
    }
  }
  return values;
}

// Compares with a tolerance. `size` bounds the terms of the value.
bool Close(RowType type, float got, double want, double size) {
  const double rounding = type == RowType::kF32 ? 0 : type == RowType::kBF16 ? 0x1p-8 : 0x1p-11;
  return std::fabs(got - want) <= rounding * std::fabs(want) + 4e-6 * size + 1e-7;
}

struct Inputs {
  Floats hidden, grad;
  std::vector<float> weights;
  Memory sizes;

  Inputs(std::mt19937& random, const ActivationCase& c)
      : hidden(RandomRows(random, c.slabs, c.type, c.width * (c.gated ? 2 : 1))),
        grad(RandomRows(random, c.slabs, c.type, c.width)),
        weights(c.slabs.all_rows()),
        sizes(c.slabs.sizes) {
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
      weights[row] = c.slabs.owner[row] < 0 ? std::nanf("") : normal(random);
    }
  }
};

// One element's operands and results.
struct Element {
  double x, up, weight, value, slope;

  Element(const ActivationCase& c, const Inputs& in, int64_t row, int i) {
    const int64_t first = row * c.width * (c.gated ? 2 : 1);
    x = in.hidden.at(first + i);
    up = c.gated ? in.hidden.at(first + c.width + i) : 1.0;
    weight = c.weighted ? in.weights[row] : 1.0;
    Activate(c.function, x, &value, &slope);
  }
  double size() const { return (1 + x * x) * (1 + std::fabs(up)) * (1 + std::fabs(weight)); }
};

bool Untouched(const Floats& values, int64_t first, int64_t count) {
  for (int64_t i = first * values.width(); i < (first + count) * values.width(); ++i) {
    if (values.bytes()[i] != 0xFF) return false;
  }
  return true;
}

bool Mismatch(const char* what, int64_t row, int i, double got, double want) {
  std::printf("%s of row %lld value %d: got %g, want %g\n", what, static_cast<long long>(row), i,
              got, want);
  return false;
}

ec::ActivationParams Params(const ActivationCase& c, const Inputs& in, const Memory& hidden,
                            const Memory& weights) {
  ec::ActivationParams params{};
  params.function = c.function;
  params.type = c.type;
  params.gated = c.gated;
  params.groups = c.slabs.On(in.sizes);
  params.width = c.width;
  params.hidden = hidden.as();
  params.weights = c.weighted ? weights.as<float>() : nullptr;
  return params;
}

bool Forward(const ActivationCase& c, const Inputs& in) {
  const Memory hidden(in.hidden), weights(in.weights);
  const Memory out(c.slabs.all_rows() * c.width * in.hidden.width());
  ec::ActivationParams params = Params(c, in, hidden, weights);
  params.out = out.as();
  const auto launch = [&] { return ec::LaunchActivation(nullptr, params); };
  if (!RunTwice(launch, {&out}, c.name("forward"))) return false;
  const Floats found(c.type, out.read());
  for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
    if (c.slabs.owner[row] < 0) {
      if (!Untouched(found, row * c.width, c.width)) return Mismatch("slack", row, 0, 0, 0);
      continue;
    }
    for (int i = 0; i < c.width; ++i) {
      const Element e(c, in, row, i);
      const double want = e.value * e.up * e.weight;
      const float got = found.at(row * c.width + i);
      if (!Close(c.type, got, want, e.size())) return Mismatch("value", row, i, got, want);
    }
  }
  return true;
}

bool CompareGradients(const ActivationCase& c, const Inputs& in, const Floats& d_hidden,
                      const std::vector<float>& d_weights, bool in_place) {
  const int wide = c.width * (c.gated ? 2 : 1);
  for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
    if (c.slabs.owner[row] < 0) {
      if (!in_place && !Untouched(d_hidden, row * wide, wide)) {
        return Mismatch("slack", row, 0, 0, 0);
      }
      if (c.weighted && d_weights[row] != 0) return Mismatch("weight", row, 0, d_weights[row], 0);
      continue;
    }
    double sum = 0, sizes = 0;
    for (int i = 0; i < c.width; ++i) {
      const Element e(c, in, row, i);
      const double g = in.grad.at(row * c.width + i), size = (1 + std::fabs(g)) * e.size();
      sum += g * e.value * e.up;
      sizes += size;
      const double want = g * e.weight * e.up * e.slope;
      const float got = d_hidden.at(row * wide + i);
      if (!Close(c.type, got, want, size)) return Mismatch("gate", row, i, got, want);
      if (!c.gated) continue;
      const double want_up = g * e.weight * e.value;
      const float got_up = d_hidden.at(row * wide + c.width + i);
      if (!Close(c.type, got_up, want_up, size)) return Mismatch("up", row, i, got_up, want_up);
    }
    if (c.weighted && std::fabs(d_weights[row] - sum) > 4e-6 * sizes) {
      return Mismatch("weight", row, 0, d_weights[row], sum);
    }
  }
  return true;
}

std::vector<float> ReadFloats(const Memory& memory) {
  const std::vector<uint8_t> bytes = memory.read();
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

bool Backward(const ActivationCase& c, const Inputs& in) {
  const Memory hidden(in.hidden), weights(in.weights), grad(in.grad);
  const Memory d_hidden(hidden.bytes()), d_weights(weights.bytes());
  ec::ActivationParams params = Params(c, in, hidden, weights);
  params.grad = grad.as();
  params.out = d_hidden.as();
  params.d_weights = c.weighted ? d_weights.as<float>() : nullptr;
  const auto launch = [&] { return ec::LaunchActivation(nullptr, params); };
  if (!RunTwice(launch, {&d_hidden, &d_weights}, c.name("backward"))) return false;
  const std::vector<uint8_t> apart = d_hidden.read();
  if (!CompareGradients(c, in, Floats(c.type, apart), ReadFloats(d_weights), false)) return false;
  // In the memory of hidden: rows of groups must be the same, and slack must stay NaN.
  params.out = hidden.as();
  if (launch() != cudaSuccess) return false;
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<uint8_t> in_place = hidden.read();
  const int64_t row_bytes = hidden.bytes() / c.slabs.all_rows();
  for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
    if (c.slabs.owner[row] < 0) continue;
    if (std::memcmp(&apart[row * row_bytes], &in_place[row * row_bytes], row_bytes) != 0) {
      return Mismatch("in place", row, 0, 0, 0);
    }
  }
  return true;
}

}  // namespace

void CheckActivations(std::mt19937& random, int count, Tally* tally) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < count; ++i) {
    const RowType type = kTypes[below(3)];
    const int width = 8 * (1 + below(below(3) == 0 ? 90 : 12));
    const ActivationCase c{RandomSlabs(random),
                           static_cast<ActivationFunction>(i % ec::kActivationFunctions),
                           type,
                           below(3) > 0,
                           below(2) == 0,
                           width};
    const Inputs in(random, c);
    tally->Add(Forward(c, in), c.name("forward"));
    tally->Add(Backward(c, in), c.name("backward"));
  }
}

}  // namespace rows_test
