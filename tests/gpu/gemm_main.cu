// Grouped products against sums in f64, and times beside one product of the same work.
//   gemm_main check|time|tune|small
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>
#include <random>

#include "gemm_case.h"

namespace gemm_test {
namespace {

constexpr int kLimitSeconds = 10;  // for one case; a kernel that hangs ends with the process
constexpr int kMaxFailures = 6;    // shown of one kind

const char* Name(GemmProduct product) {
  switch (product) {
    case GemmProduct::kForward:
      return "forward";
    case GemmProduct::kDataGrad:
      return "data grad";
    case GemmProduct::kWeightGrad:
      return "weight grad";
  }
  return "?";
}

const char* Name(FloatType type) {
  return type == FloatType::kF32 ? "f32" : type == FloatType::kBF16 ? "bf16" : "f16";
}

const GemmProduct kProducts[] = {GemmProduct::kForward, GemmProduct::kDataGrad,
                                 GemmProduct::kWeightGrad};

GemmCase MakeCase(const char* name, GemmProduct product, std::vector<int> sizes, int rows, int in,
                  int out) {
  GemmCase c;
  c.name = name;
  c.product = product;
  c.slab_rows = rows;
  c.experts = static_cast<int>(sizes.size());
  c.in_features = in;
  c.out_features = out;
  c.sizes = std::move(sizes);
  c.tuning = ec::TunedGemm(product);
  return c;
}

std::vector<GemmCase> FixedCases(GemmProduct p) {
  std::vector<GemmCase> cases;
  cases.push_back(MakeCase("one tile", p, {128}, 128, 64, 256));
  cases.push_back(MakeCase("one pair of tiles", p, {256}, 256, 256, 256));
  cases.push_back(MakeCase("ring goes round", p, {1024}, 1024, 1024, 1024));
  cases.push_back(MakeCase("zones of 128", p, {256, 128, 0, 384, 0}, 1024, 512, 768));
  cases.push_back(MakeCase("zones of 16", p, {16, 240, 0, 48, 144, 400}, 1000, 192, 320));
  cases.push_back(MakeCase("any sizes", p, {1, 63, 64, 65, 0, 127, 129, 300}, 800, 200, 328));
  cases.push_back(MakeCase("odd tiles beside each other", p, {384, 128}, 512, 520, 776));
  cases.push_back(MakeCase("no rows at all", p, {0, 0, 0}, 256, 128, 128));
  cases.push_back(MakeCase("more than the slab holds", p, {200, 300, 100}, 400, 128, 256));
  cases.push_back(MakeCase("smallest features", p, {5, 7}, 16, 8, 8));
  GemmCase slabs =
      MakeCase("two slabs, shared experts", p, {100, 0, 60, 33, 200, 17}, 300, 136, 264);
  slabs.slabs = 2;
  slabs.experts = 3;
  cases.push_back(slabs);
  slabs.name = "two slabs, own experts";
  slabs.experts = 6;
  cases.push_back(slabs);
  GemmCase many = MakeCase("many groups", p, {}, 2048, 64, 128);
  for (int i = 0; i < 300; ++i) many.sizes.push_back(i % 13);
  many.experts = 300;
  cases.push_back(many);
  GemmCase narrow = MakeCase("tiles of 128 columns", p, {130, 400, 0, 256}, 900, 320, 456);
  narrow.tuning.tile_columns = 128;
  cases.push_back(narrow);
  return cases;
}

std::vector<GemmCase> Variants(const std::vector<GemmCase>& cases) {
  std::vector<GemmCase> all;
  for (const GemmCase& c : cases) {
    all.push_back(c);
    if (c.tuning.tile_columns != 256) continue;
    for (const FloatType type : {FloatType::kBF16, FloatType::kF16}) {
      for (const FloatType out : {type, FloatType::kF32}) {
        if (type == FloatType::kBF16 && out == type) continue;
        GemmCase other = c;
        other.type = type;
        other.out_type = out;
        all.push_back(other);
      }
    }
    if (c.product == GemmProduct::kForward) {
      GemmCase other = c;
      other.bias = true;
      all.push_back(other);
    }
    if (c.product == GemmProduct::kDataGrad) {
      GemmCase other = c;
      other.clear_slack = true;
      all.push_back(other);
    }
  }
  return all;
}

GemmCase RandomCase(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  GemmCase c;
  c.name = "random";
  c.product = kProducts[below(3)];
  c.slabs = 1 + (below(4) == 0);
  const int groups = 1 + below(12);
  c.experts = below(3) == 0 ? groups : groups * c.slabs;
  c.in_features = 8 * (1 + below(100));
  c.out_features = 8 * (1 + below(100));
  const int alignment = 1 << below(9);
  int most = 0;
  for (int slab = 0; slab < c.slabs; ++slab) {
    int sum = 0;
    for (int g = 0; g < groups; ++g) {
      c.sizes.push_back(below(3) == 0 ? 0 : below(400) / alignment * alignment);
      sum += c.sizes.back();
    }
    most = std::max(most, sum);
  }
  c.slab_rows = std::max(1, most + below(200) - 20);
  c.tuning.band = 1 + below(9);
  c.bias = c.product == GemmProduct::kForward && below(2) == 0;
  c.clear_slack = c.product == GemmProduct::kDataGrad && below(2) == 0;
  switch (below(4)) {
    case 0:
      c.out_type = FloatType::kF32;
      break;
    case 1:
      c.tuning.tile_columns = 128;
      break;
    case 2:
      c.type = c.out_type = FloatType::kF16;
      break;
    default:
      break;
  }
  return c;
}

void OnAlarm(int) {
  static const char kText[] = "a case did not end\n";
  if (write(2, kText, sizeof(kText) - 1) < 0) _exit(125);
  _exit(124);
}

void Describe(const GemmCase& c) {
  std::printf("%s, %s, %s -> %s, %d x %d rows, %d experts, K' %d, N' %d, tile %d, band %d%s, sizes",
              c.name.c_str(), Name(c.product), Name(c.type), Name(c.out_type), c.slabs, c.slab_rows,
              c.experts, c.in_features, c.out_features, c.tuning.tile_columns, c.tuning.band,
              c.clear_slack ? ", slack cleared"
              : c.bias      ? ", bias"
                            : "");
  for (size_t i = 0; i < std::min<size_t>(c.sizes.size(), 16); ++i) std::printf(" %d", c.sizes[i]);
  std::printf("\n");
}

void Print(const Mismatch& mismatch, int64_t width, int64_t compared) {
  std::printf(
      "FAILED  %llu of %lld elements; first at row %llu column %llu: got %g, want %g "
      "(nan: nothing)\n  by 16 rows of a tile:",
      mismatch.count, static_cast<long long>(compared), mismatch.first / width,
      mismatch.first % width, mismatch.got, mismatch.want);
  for (const auto count : mismatch.in_rows) std::printf(" %llu", count);
  std::printf("\n  by 32 columns:");
  for (const auto count : mismatch.in_columns) std::printf(" %llu", count);
  std::printf("\n  ");
}

// Returns whether the case holds.
bool Run(const GemmCase& c, bool quiet) {
  alarm(kLimitSeconds);
  Data data(c);
  CHECK_CUDA(cudaDeviceSynchronize());
  const cudaError_t launched = ec::LaunchGroupedGemm(nullptr, data.Params());
  const cudaError_t ended = cudaDeviceSynchronize();
  if (launched != cudaSuccess || ended != cudaSuccess) {
    std::printf("FAILED  launch: %s, end: %s: ", cudaGetErrorString(launched),
                cudaGetErrorString(ended));
    Describe(c);
    if (ended != cudaSuccess) std::exit(4);
    return false;
  }
  const Mismatch mismatch = data.Compare(1);
  const unsigned long long different = data.RunTwiceAndDiffer(nullptr);
  if (mismatch.count == 0 && different == 0) return true;
  if (quiet) return false;
  Print(mismatch, c.product == GemmProduct::kDataGrad ? c.in_features : c.out_features,
        data.out_elements());
  std::printf("%llu bytes differ between runs: ", different);
  Describe(c);
  return false;
}

// Returns how many fail.
int RunAll(const char* kind, const std::vector<GemmCase>& cases) {
  int failures = 0;
  for (const GemmCase& c : cases) failures += !Run(c, failures >= kMaxFailures);
  std::printf("%s: %d of %zu cases failed\n", kind, failures, cases.size());
  return failures;
}

int CheckAll(bool small) {
  int failures = 0;
  for (const GemmProduct product : kProducts) {
    const std::vector<GemmCase> cases = FixedCases(product);
    failures += RunAll(Name(product), small ? cases : Variants(cases));
  }
  std::mt19937 random(1);
  std::vector<GemmCase> cases;
  for (int i = 0; i < (small ? 5 : 300); ++i) cases.push_back(RandomCase(random));
  return failures + RunAll("random", cases);
}

// Rows of `groups` groups in multiples of 128 that sum to `rows`.
std::vector<int> Load(const std::string& load, int groups, int rows) {
  std::vector<int> sizes(groups, rows / groups);
  if (load == "half empty") {
    for (int g = 0; g < groups; ++g) sizes[g] /= 2;
  }
  if (load != "zipf") return sizes;
  double sum = 0;
  for (int g = 0; g < groups; ++g) sum += 1.0 / (g + 1);
  int left = rows / 128;
  for (int g = 0; g < groups; ++g) {
    const int blocks = std::min(left, static_cast<int>(rows / 128 / (g + 1) / sum));
    sizes[g] = 128 * blocks;
    left -= blocks;
  }
  sizes[0] += 128 * left;
  std::shuffle(sizes.begin(), sizes.end(), std::mt19937(7));
  return sizes;
}

struct Time {
  double median_ms;
  double least_ms;
};

Time Measure(const Data& data) {
  constexpr int kWarm = 3, kRuns = 11;
  cudaEvent_t events[kRuns + 1];
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < kWarm; ++i) CHECK_CUDA(ec::LaunchGroupedGemm(nullptr, data.Params()));
  CHECK_CUDA(cudaEventRecord(events[0]));
  for (int i = 0; i < kRuns; ++i) {
    CHECK_CUDA(ec::LaunchGroupedGemm(nullptr, data.Params()));
    CHECK_CUDA(cudaEventRecord(events[i + 1]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(kRuns);
  for (int i = 0; i < kRuns; ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  std::sort(times.begin(), times.end());
  return {times[kRuns / 2], times[0]};
}

double PrintTime(const GemmCase& c, double dense) {
  alarm(kLimitSeconds);
  Data data(c);
  const Time time = Measure(data);
  const Mismatch mismatch = data.Compare(std::max<int64_t>(1, data.out_elements() / 20000));
  const double work = 2.0 * data.total() * c.in_features * c.out_features;
  const double speed = work / time.median_ms * 1e-9;
  std::printf("%-11s %5d %5d %4d  %-10s %-4s %4d %3d  %7.3f %7.3f  %6.1f", Name(c.product),
              c.in_features, c.out_features, c.experts, c.name.c_str(), Name(c.out_type),
              c.tuning.tile_columns, c.tuning.band, time.median_ms, time.least_ms, speed);
  if (dense > 0) std::printf("  %5.1f%%", 100 * speed / dense);
  if (mismatch.count > 0) std::printf("  WRONG: %llu of the sample", mismatch.count);
  std::printf("\n");
  return speed;
}

constexpr int kRows = 32768;
const int kShapes[][2] = {{7168, 4096}, {2048, 7168}};

void PrintHeader() {
  std::printf(
      "product        K'    N' exps  load       out  tile band  median   least  TFLOP/s  "
      "of one group\n");
}

void TimeAll() {
  PrintHeader();
  for (const auto& shape : kShapes) {
    for (const GemmProduct product : kProducts) {
      const auto make = [&](const char* load, int groups) {
        return MakeCase(load, product, Load(load, groups, kRows), kRows, shape[0], shape[1]);
      };
      const double dense = PrintTime(make("even", 1), 0);
      for (const int groups : {8, 32, 128}) {
        for (const char* load : {"even", "zipf"}) PrintTime(make(load, groups), dense);
      }
      PrintTime(make("half empty", 32), dense);
      GemmCase wide = make("even", 32);
      wide.out_type = FloatType::kF32;
      PrintTime(wide, dense);
    }
  }
}

void Tune() {
  PrintHeader();
  for (const auto& shape : kShapes) {
    for (const GemmProduct product : kProducts) {
      for (const char* load : {"even", "zipf"}) {
        for (const int columns : {256, 128}) {
          for (const int band : {1, 2, 4, 8, 16}) {
            GemmCase c = MakeCase(load, product, Load(load, 32, kRows), kRows, shape[0], shape[1]);
            c.tuning = {columns, band};
            PrintTime(c, 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gemm_test

int main(int argc, char** argv) {
  std::signal(SIGALRM, gemm_test::OnAlarm);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* what = argc > 1 ? argv[1] : "check";
  if (std::strcmp(what, "check") == 0) return gemm_test::CheckAll(false) > 0;
  if (std::strcmp(what, "small") == 0) return gemm_test::CheckAll(true) > 0;
  if (std::strcmp(what, "time") == 0) {
    gemm_test::TimeAll();
    return 0;
  }
  if (std::strcmp(what, "tune") == 0) {
    gemm_test::Tune();
    return 0;
  }
  std::fprintf(stderr, "unknown: %s (check, small, time or tune)\n", what);
  return 2;
}
