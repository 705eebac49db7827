// Checks grouped products against sums in f64, and products with an activation against two
// launches. Times the latter; `ep-runtime bench gemm` times products.
//
//   gemm_main check|small [16|8|32|copies]     nothing: all of them
//   gemm_main time
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "gemm_activation.h"
#include "gemm_cases.h"
#include "gemm_copies.h"

namespace gemm_test {
namespace {

constexpr int kLimitSeconds = 10;  // for one case; a hanging kernel ends with the process
constexpr int kMaxFailures = 6;    // printed for one kind

void OnAlarm(int) {
  static const char kText[] = "a case did not end\n";
  if (write(2, kText, sizeof(kText) - 1) < 0) _exit(125);
  _exit(124);
}

void Describe(const GemmCase& c) {
  std::printf(
      "%s, %s, %s x %s -> %s, %d x %d rows, %d experts, K' %d, N' %d, band "
      "%d%s%s%s%s, "
      "sizes",
      c.name.c_str(), Name(c.product), Name(c.type), Name(c.rhs_type), Name(c.out_type), c.slabs,
      c.slab_rows, c.experts, c.in_features, c.out_features, c.tuning.band,
      c.scaling == GemmScaling::kBlock ? ", block scales" : "",
      c.whole_numbers ? ", whole numbers" : "", c.pair ? ", pair" : "",
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

// Returns whether the case passes.
bool Run(const GemmCase& c, bool quiet, double* worst) {
  alarm(kLimitSeconds);
  Data data(c);
  CHECK_CUDA(cudaDeviceSynchronize());
  const cudaError_t launched = data.Launch(nullptr);
  const cudaError_t ended = cudaDeviceSynchronize();
  if (launched != cudaSuccess || ended != cudaSuccess) {
    std::printf("FAILED  launch: %s, end: %s: ", cudaGetErrorString(launched),
                cudaGetErrorString(ended));
    Describe(c);
    if (ended != cudaSuccess) std::exit(4);
    return false;
  }
  const Mismatch mismatch = data.Compare();
  const unsigned long long different = data.RunTwiceAndDiffer(nullptr);
  const unsigned long long in_blocks = data.RunAsInBlocks(nullptr);
  const std::string activated = DifferActivated(c, data);
  *worst = std::max(*worst, mismatch.worst);
  if (mismatch.count == 0 && different == 0 && in_blocks == 0 && activated.empty()) return true;
  if (quiet) return false;
  Print(mismatch, c.product == GemmProduct::kDataGrad ? c.in_features : c.out_features,
        data.out_elements());
  std::printf("%llu bytes differ between runs, %llu as in block calls%s%s: ", different, in_blocks,
              activated.empty() ? "" : "; with an activation, ", activated.c_str());
  Describe(c);
  return false;
}

struct Count {
  int wrong = 0;
  int all = 0;
};

void RunAll(Kind kind, const char* what, const std::vector<GemmCase>& cases, Count* count) {
  int failures = 0;
  double worst = 0;
  for (const GemmCase& c : cases) failures += !Run(c, failures >= kMaxFailures, &worst);
  std::printf("%s, %s: %d of %zu cases failed; errors up to %.2f of what is allowed\n", Name(kind),
              what, failures, cases.size(), worst);
  count->wrong += failures;
  count->all += static_cast<int>(cases.size());
}

void CheckKind(Kind kind, bool small, Count* count) {
  for (const GemmProduct product : kProducts) {
    RunAll(kind, Name(product), FixedCases(product, kind, small), count);
  }
  RunAll(kind, "random", RandomCases(kind, small ? 5 : 300), count);
}

bool Wants(const char* part, const char* wanted) {
  return std::strcmp(wanted, "") == 0 || std::strcmp(part, wanted) == 0;
}

int CheckAll(bool small, const char* part) {
  Count count;
  if (Wants("copies", part)) {
    count.wrong += CheckCopies(&count.all);
  }
  if (Wants("16", part)) CheckKind(Kind::kWide, small, &count);
  if (Wants("8", part)) {
    CheckKind(Kind::kTensor, small, &count);
    CheckKind(Kind::kBlock, small, &count);
  }
  if (Wants("32", part)) CheckKind(Kind::kTf32, small, &count);
  std::printf("%d of %d wrong\n", count.wrong, count.all);
  return count.wrong > 0 || count.all == 0;
}

}  // namespace
}  // namespace gemm_test

int main(int argc, char** argv) {
  std::signal(SIGALRM, gemm_test::OnAlarm);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* what = argc > 1 ? argv[1] : "check";
  const char* part = argc > 2 ? argv[2] : "";
  if (std::strcmp(what, "check") == 0) return gemm_test::CheckAll(false, part);
  if (std::strcmp(what, "small") == 0) return gemm_test::CheckAll(true, part);
  if (std::strcmp(what, "time") == 0) {
    gemm_test::TimeActivated();
    return 0;
  }
  std::fprintf(stderr, "unknown: %s (check, small or time)\n", what);
  return 2;
}
