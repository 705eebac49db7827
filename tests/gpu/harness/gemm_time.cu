// Times of grouped products.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "gemm_cases.h"
#include "gemm_time.h"

namespace gemm_test {
namespace {

constexpr int kLimitSeconds = 10;  // for one case; a hanging kernel ends with the process
constexpr int kRows = 32768;
const int kShapes[][2] = {{7168, 4096}, {2048, 7168}};

// Sizes of `groups` groups, multiples of 128, which add up to `rows`.
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

Time Measure(const std::function<void()>& launch) {
  constexpr int kWarm = 3, kRuns = 11;
  cudaEvent_t events[kRuns + 1];
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < kWarm; ++i) launch();
  CHECK_CUDA(cudaEventRecord(events[0]));
  for (int i = 0; i < kRuns; ++i) {
    launch();
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

Time MeasureProduct(const Data& data) {
  return Measure([&] { CHECK_CUDA(ec::LaunchGroupedGemm(nullptr, data.Params())); });
}

GemmCase CaseOf(const char* load, GemmProduct product, const int (&shape)[2], int groups,
                Kind kind = Kind::kWide) {
  return MakeCase(load, product, Load(load, groups, kRows), kRows, shape[0], shape[1], kind);
}

void PrintHeader(const char* beside) {
  std::printf(
      "product        K'    N' exps  load       lhs  rhs  out  band way     median   least  "
      "TFLOP/s  %s\n",
      beside);
}

const char* WayOf(const GemmCase& c) {
  if (c.scaling == GemmScaling::kBlock) return "block";
  return c.narrow() ? "promote" : "whole";
}

// Prints everything up to the speed, without the line's end.
void PrintSpeed(const GemmCase& c, const Time& time, double speed) {
  std::printf("%-11s %5d %5d %4d  %-10s %-4s %-4s %-4s %4d %-7s %7.3f %7.3f  %6.1f",
              Name(c.product), c.in_features, c.out_features, c.experts, c.name.c_str(),
              Name(c.type), Name(c.rhs_type), Name(c.out_type), c.tuning.band, WayOf(c),
              time.median_ms, time.least_ms, speed);
}

double SpeedOf(const GemmCase& c, const Data& data, double ms) {
  return 2.0 * data.total() * c.in_features * c.out_features / ms * 1e-9;
}

// Prints and returns TFLOP/s. `beside` is the speed to compare with; 0: none.
double PrintTime(const GemmCase& c, double beside) {
  alarm(kLimitSeconds);
  Data data(c);
  const Time time = MeasureProduct(data);
  const double speed = SpeedOf(c, data, time.median_ms);
  PrintSpeed(c, time, speed);
  if (beside > 0) std::printf("  %5.2f", speed / beside);
  if (c.transposed()) {
    const Time transposed = Measure([&] { data.Transpose(nullptr); });
    const double both = SpeedOf(c, data, time.median_ms + transposed.median_ms);
    std::printf("  %5.2f with transposed copies of %.3f ms", both / beside, transposed.median_ms);
  }
  const Mismatch mismatch = data.Compare(std::max<int64_t>(1, data.out_elements() / 20000));
  if (mismatch.count > 0) std::printf("  WRONG: %llu of the sample", mismatch.count);
  std::printf("\n");
  return speed;
}

}  // namespace

void TimeWide() {
  PrintHeader("of one group");
  for (const auto& shape : kShapes) {
    for (const GemmProduct product : kProducts) {
      const double dense = PrintTime(CaseOf("even", product, shape, 1), 0);
      for (const int groups : {8, 32, 128}) {
        for (const char* load : {"even", "zipf"}) {
          PrintTime(CaseOf(load, product, shape, groups), dense);
        }
      }
      PrintTime(CaseOf("half empty", product, shape, 32), dense);
      GemmCase wide = CaseOf("even", product, shape, 32);
      wide.out_type = FloatType::kF32;
      PrintTime(Tuned(wide), dense);
    }
  }
}

void TimeNarrow() {
  PrintHeader("of bf16");
  for (const auto& shape : kShapes) {
    for (const GemmProduct product : kProducts) {
      for (const int groups : {8, 32, 128}) {
        for (const char* load : {"even", "zipf"}) {
          const double wide = PrintTime(CaseOf(load, product, shape, groups), 0);
          for (const Kind kind : {Kind::kTensor, Kind::kBlock}) {
            GemmCase c = CaseOf(load, product, shape, groups, kind);
            if (product == GemmProduct::kWeightGrad) c.rhs_type = FloatType::kE5M2;
            if (product == GemmProduct::kDataGrad) c.type = FloatType::kE5M2;
            PrintTime(Tuned(c), wide);
          }
        }
      }
    }
  }
}

void TimeTf32() {
  PrintHeader("of bf16");
  for (const auto& shape : kShapes) {
    for (const GemmProduct product : kProducts) {
      for (const int groups : {8, 32, 128}) {
        for (const char* load : {"even", "zipf"}) {
          const double wide = PrintTime(CaseOf(load, product, shape, groups), 0);
          PrintTime(CaseOf(load, product, shape, groups, Kind::kTf32), wide);
        }
      }
    }
  }
}

}  // namespace gemm_test
