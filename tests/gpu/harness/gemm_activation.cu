// Compares first products that also compute the activation with two launches, and times both.
#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "cuda/rows/activation_quantize.h"
#include "energy.h"
#include "gemm_activation.h"

namespace gemm_test {
namespace {

using gpu_test::Memory;

std::vector<float> RandomWeights(int64_t rows, int seed) {
  std::mt19937 random(seed);
  std::vector<float> weights(rows);
  for (float& weight : weights) {
    const auto kind = random() % 64;
    weight = kind == 0 ? INFINITY : kind == 1 ? NAN : (random() % 512) / 256.0f;
  }
  return weights;
}

// Results of either way, in separate arrays.
class Activated {
 public:
  Activated(const GemmCase& c, const Data& data, ec::ActivationFunction function, bool weighted)
      : case_(c),
        product_(data.Params()),
        function_(function),
        width_(c.out_features / 2),
        weights_(RandomWeights(c.rows(), width_)),
        out_(c.rows() * c.out_features * 2),
        inner_(c.rows() * width_ * (c.narrow() ? 1 : 2)),
        scale_(c.narrow() ? c.rows() * (width_ / 128) * 4 : 0) {
    if (weighted) given_ = weights_.as<float>();
    product_.out = out_.as<void>();
  }

  static bool Has(const GemmCase& c) {
    const bool types = c.narrow() ? c.scaling == GemmScaling::kBlock &&
                                        c.type == FloatType::kE4M3 && c.out_type == FloatType::kBF16
                                  : c.type == c.out_type;
    return c.product == GemmProduct::kForward && types && c.type != FloatType::kTF32 &&
           c.out_features % (c.narrow() ? 256 : 16) == 0;
  }

  // Launches both kernels, one after the other.
  void InTurn() const {
    CHECK_CUDA(ec::LaunchGroupedGemm(nullptr, product_));
    const ec::rows::RowGroups groups{product_.group_sizes, case_.slabs, case_.groups_per_slab(),
                                     case_.slab_rows};
    const auto type = case_.out_type == FloatType::kF16 ? ec::RowType::kF16 : ec::RowType::kBF16;
    if (!case_.narrow()) {
      CHECK_CUDA(
          ec::LaunchActivation(nullptr, {function_, type, true, groups, width_, out_.as<void>(),
                                         given_, nullptr, inner_.as<void>(), nullptr}));
      return;
    }
    ec::QuantizedActivationParams activation{};
    activation.function = function_;
    activation.type = type;
    activation.gated = true;
    activation.groups = groups;
    activation.width = width_;
    activation.hidden = out_.as<void>();
    activation.weights = given_;
    activation.format = ec::Fp8Format::kE4M3;
    activation.power_of_two = case_.whole_numbers;
    activation.data = inner_.as<uint8_t>();
    activation.tile_scale = scale_.as<float>();
    CHECK_CUDA(ec::LaunchQuantizedActivation(nullptr, activation));
  }
  // Launches one kernel, which may leave the product itself out.
  void AtOnce(bool stores) const {
    ec::GroupedGemmParams product = product_;
    product.activation = {function_, given_, inner_.as<void>(),
                          case_.narrow() ? scale_.as<float>() : nullptr, case_.whole_numbers};
    if (!stores) product.out = nullptr;
    CHECK_CUDA(ec::LaunchGroupedGemm(nullptr, product));
  }

  // Says where the results of both ways first differ; empty: nowhere.
  std::string Differ() {
    const auto run = [&](const std::function<void()>& launch) {
      for (Memory* each : {&inner_, &scale_, &out_}) each->Poison();
      launch();
      std::vector<std::vector<uint32_t>> found;  // words, then 0 after writes past their end
      for (Memory* each : {&inner_, &scale_, &out_}) {
        found.push_back(each->read<uint32_t>());
        found.back().push_back(each->intact());
      }
      return found;
    };
    const auto want = run([&] { InTurn(); });
    for (const bool stores : {true, false}) {
      auto got = run([&] { AtOnce(stores); });
      if (!stores) got.pop_back();
      for (size_t i = 0; i < got.size(); ++i) {
        const auto found = std::mismatch(got[i].begin(), got[i].end(), want[i].begin());
        if (found.first == got[i].end()) continue;
        const size_t at = found.first - got[i].begin();
        const size_t each = std::max<size_t>((got[i].size() - 1) / case_.rows(), 1);
        char text[200];
        std::snprintf(text, sizeof(text), "%s%s differs at row %zu, word %zu: %08x, not %08x",
                      given_ == nullptr ? "" : "weighted ", kResults[i], at / each, at % each,
                      *found.first, *found.second);
        return text;
      }
    }
    return "";
  }

 private:
  static constexpr const char* kResults[] = {"activation", "scale", "product"};

  const GemmCase& case_;
  ec::GroupedGemmParams product_;
  ec::ActivationFunction function_;
  int32_t width_;
  const float* given_ = nullptr;
  Memory weights_, out_, inner_, scale_;
};

struct Measured {
  double us;
  double mj;
};

// Launches for about half a second, because counters of energy advance slowly.
Measured Measure(const std::function<void()>& launch) {
  cudaEvent_t before, after;
  CHECK_CUDA(cudaEventCreate(&before));
  CHECK_CUDA(cudaEventCreate(&after));
  const auto time = [&](int count) {
    CHECK_CUDA(cudaEventRecord(before));
    for (int i = 0; i < count; ++i) launch();
    CHECK_CUDA(cudaEventRecord(after));
    CHECK_CUDA(cudaEventSynchronize(after));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, before, after));
    return 1e3 * ms / count;
  };
  const int count = static_cast<int>(std::max(10.0, 5e5 / time(10)));
  const double drawn = gpu_test::DrawnMillijoules(1);
  const double us = time(count);
  CHECK_CUDA(cudaEventDestroy(before));
  CHECK_CUDA(cudaEventDestroy(after));
  return {us, (gpu_test::DrawnMillijoules(1) - drawn) / count};
}

void TimeCase(const GemmCase& c) {
  const Data data(c);
  const Activated activated(c, data, ec::ActivationFunction::kSilu, true);
  std::printf("== %s: H=%d M=%d E=%d, %d rows, %s\n", c.name.c_str(), c.in_features,
              c.out_features / 2, c.experts, c.slab_rows, c.narrow() ? "block scales" : "bf16");
  const std::pair<const char*, std::function<void()>> ways[] = {
      {"product", [&] { CHECK_CUDA(data.Launch(nullptr)); }},
      {"product, activation", [&] { activated.InTurn(); }},
      {"both at once", [&] { activated.AtOnce(true); }},
      {"both at once, activation stored", [&] { activated.AtOnce(false); }},
  };
  for (int round = 0; round < 3; ++round) {
    for (const auto& [name, launch] : ways) {
      const Measured found = Measure(launch);
      std::printf("%-32s %8.1f us %8.2f mJ\n", name, found.us, found.mj);
    }
  }
}

}  // namespace

std::string DifferActivated(const GemmCase& c, const Data& data) {
  if (!Activated::Has(c)) return "";
  const auto function = static_cast<ec::ActivationFunction>(c.rows() % ec::kActivationFunctions);
  const std::string plain = Activated(c, data, ec::ActivationFunction::kSilu, false).Differ();
  return plain.empty() ? Activated(c, data, function, true).Differ() : plain;
}

void TimeActivated() {
  struct Layer {
    const char* name;
    int rows, hidden, inner, experts;
  };
  for (const Layer& layer : {Layer{"8-layers", 65536, 2048, 1024, 32},
                             {"deepseek-like", 32768, 7168, 2048, 32},
                             {"small experts", 65536, 2048, 768, 64},
                             {"wide experts", 16384, 4096, 14336, 4}}) {
    for (const bool narrow : {false, true}) {
      GemmCase c;
      c.name = layer.name;
      c.slab_rows = layer.rows;
      c.experts = layer.experts;
      c.in_features = layer.hidden;
      c.out_features = 2 * layer.inner;
      if (narrow) {
        c.type = c.rhs_type = FloatType::kE4M3;
        c.scaling = GemmScaling::kBlock;
      }
      std::mt19937 random(1);
      c.sizes.assign(layer.experts, 0);
      for (int i = 0; i < layer.rows; ++i) ++c.sizes[random() % layer.experts];
      c.tuning = ec::TunedGemm(c.Params());
      TimeCase(c);
    }
  }
}

}  // namespace gemm_test
