// Activations as 8-bit floats: the bits of the activation followed by the quantization.
#include "cuda/rows/activation_quantize.h"
#include "rows_case.h"

namespace rows_test {
namespace {

struct FusedCase {
  Slabs slabs;
  ActivationFunction function;
  RowType type;
  Fp8Format format;
  bool gated, weighted, backward, tiled, power_of_two;
  int width;  // M
  int experts;

  int halves() const { return gated && backward ? 2 : 1; }
  int wide() const { return width * halves(); }
  int tiles() const { return (width + ec::kTile - 1) / ec::kTile * halves(); }
  std::string name() const {
    return std::string(backward ? "gradients of " : "values of ") + (gated ? "gated " : "") +
           std::to_string(static_cast<int>(function)) +
           (type == RowType::kBF16 ? " bf16" : " f16") + (weighted ? " weighted" : "") +
           (format == Fp8Format::kE4M3 ? " as e4m3" : " as e5m2") + (tiled ? " in tiles" : "") +
           (power_of_two ? " 2^n, " : ", ") + std::to_string(slabs.slabs) + " x " +
           std::to_string(slabs.rows) + " rows of " + std::to_string(width) + ", " +
           std::to_string(slabs.used) + " used in " + std::to_string(slabs.groups) + " groups";
  }
};

struct FusedInputs {
  Memory sizes, hidden, grad, weights;

  static Floats Rows(std::mt19937& random, const FusedCase& c, int width) {
    std::normal_distribution<float> normal(0.0f, 2.0f);
    Floats values(c.type, c.slabs.all_rows() * width);
    for (int64_t at = 0; at < c.slabs.all_rows() * width; ++at) {
      float value = c.slabs.owner[at / width] < 0 ? std::nanf("") : normal(random);
      if (random() % 5000 == 0) value = random() % 2 ? INFINITY : std::nanf("");
      values.set(at, value);
    }
    return values;
  }
  static std::vector<float> Weights(std::mt19937& random, const FusedCase& c) {
    std::normal_distribution<float> normal;
    std::vector<float> weights(c.slabs.all_rows());
    for (size_t row = 0; row < weights.size(); ++row) {
      weights[row] = c.slabs.owner[row] < 0 ? std::nanf("") : normal(random);
    }
    return weights;
  }
  FusedInputs(std::mt19937& random, const FusedCase& c)
      : sizes(c.slabs.sizes),
        hidden(Rows(random, c, c.width * (c.gated ? 2 : 1))),
        grad(Rows(random, c, c.width)),
        weights(Weights(random, c)) {}
};

// Results of the two kernels one after the other, in memory with zeros for slack.
struct Unfused {
  Memory rows, amax, data, scale, d_weights;

  Unfused(const FusedCase& c, const FusedInputs& in, const Memory& given)
      : rows(c.slabs.all_rows() * c.wide() * 2),
        amax(c.experts * 4),
        data(c.slabs.all_rows() * c.wide()),
        scale(c.slabs.all_rows() * c.tiles() * 4),
        d_weights(c.slabs.all_rows() * 4) {
    ec::ActivationParams activation{};
    activation.function = c.function;
    activation.type = c.type;
    activation.gated = c.gated;
    activation.groups = c.slabs.On(in.sizes);
    activation.width = c.width;
    activation.hidden = in.hidden.as();
    activation.weights = c.weighted ? in.weights.as<float>() : nullptr;
    activation.grad = c.backward ? in.grad.as() : nullptr;
    activation.out = rows.as();
    activation.d_weights = c.backward && c.weighted ? d_weights.as<float>() : nullptr;
    CHECK_CUDA(ec::LaunchActivation(nullptr, activation));
    const ec::AmaxParams largest{c.type,    c.slabs.On(in.sizes), c.wide(), c.experts,
                                 rows.as(), amax.as<float>()};
    CHECK_CUDA(ec::LaunchGroupAmax(nullptr, largest));
    ec::QuantizeRowsParams quantize{c.type,
                                    c.format,
                                    c.slabs.On(in.sizes),
                                    c.wide(),
                                    rows.as(),
                                    c.tiled ? nullptr : given.as<float>(),
                                    c.power_of_two,
                                    false,
                                    data.as<uint8_t>(),
                                    c.tiled ? scale.as<float>() : nullptr};
    // Tiles end with gate and up, so each of them counts as a row here, and each slack row as two.
    std::vector<int> twice = c.slabs.sizes;
    for (int& size : twice) size *= c.halves();
    const Memory halves(twice);
    if (c.tiled) {
      quantize.groups = {halves.as<const int32_t>(), c.slabs.slabs, c.slabs.groups,
                         c.slabs.rows * c.halves()};
      quantize.width = c.width;
    }
    CHECK_CUDA(ec::LaunchQuantizeRows(nullptr, quantize));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
};

bool SameBytes(const char* what, const Memory& got, const Memory& want) {
  const std::vector<uint8_t> found = got.read(), wanted = want.read();
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (found.size() == wanted.size() && found[i] == wanted[i]) continue;
    std::printf("%s: byte %zu of %zu: got %02X, want %02X\n", what, i, wanted.size(), found[i],
                wanted[i]);
    return false;
  }
  return true;
}

bool Check(std::mt19937& random, const FusedCase& c) {
  const FusedInputs in(random, c);
  std::vector<float> scales(c.slabs.slabs * c.slabs.groups);
  for (size_t g = 0; g < scales.size(); ++g) scales[g] = 0.01f * static_cast<float>(1 + g % 5);
  const Memory given(scales);
  const Unfused want(c, in, given);
  const Memory amax(want.amax.bytes()), data(want.data.bytes()), scale(want.scale.bytes());
  const Memory d_weights(want.d_weights.bytes());
  ec::QuantizedActivationParams params{};
  params.function = c.function;
  params.type = c.type;
  params.gated = c.gated;
  params.groups = c.slabs.On(in.sizes);
  params.width = c.width;
  params.hidden = in.hidden.as();
  params.weights = c.weighted ? in.weights.as<float>() : nullptr;
  params.grad = c.backward ? in.grad.as() : nullptr;
  params.amax = amax.as<float>();
  params.num_experts = c.experts;
  const auto launch = [&] { return ec::LaunchQuantizedActivation(nullptr, params); };
  if (!RunTwice(launch, {&amax}, c.name())) return false;
  params.amax = nullptr;
  params.format = c.format;
  params.group_scale = c.tiled ? nullptr : given.as<float>();
  params.power_of_two = c.power_of_two;
  params.data = data.as<uint8_t>();
  params.tile_scale = c.tiled ? scale.as<float>() : nullptr;
  params.d_weights = c.backward && c.weighted ? d_weights.as<float>() : nullptr;
  if (!RunTwice(launch, {&data, &scale, &d_weights}, c.name())) return false;
  return SameBytes("amax", amax, want.amax) && SameBytes("data", data, want.data) &&
         SameBytes("scale", scale, want.scale) &&
         SameBytes("gradient of weights", d_weights, want.d_weights);
}

}  // namespace

void CheckFused(std::mt19937& random, int count, Tally* tally) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 2 * count; ++i) {
    Slabs slabs = RandomSlabs(random);
    const int groups = slabs.slabs * slabs.groups;
    const int experts = below(2) ? groups : slabs.groups;
    const FusedCase c{std::move(slabs),
                      static_cast<ActivationFunction>(i % ec::kActivationFunctions),
                      below(2) ? RowType::kBF16 : RowType::kF16,
                      static_cast<Fp8Format>(below(2)),
                      below(3) > 0,
                      below(2) == 0,
                      below(2) == 0,
                      below(2) == 0,
                      below(2) == 0,
                      8 * (1 + below(below(3) == 0 ? 90 : 20)),
                      experts};
    tally->Add(Check(random, c), c.name());
  }
}

}  // namespace rows_test
