// Checks kernels that visit rows against plain loops on the host, and times them next to a copy.
//
//   rows_main check|small|time
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "rows_case.h"

namespace rows_test {

Slabs::Slabs(int slabs, int rows, std::vector<int> sizes)
    : slabs(slabs),
      rows(rows),
      groups(static_cast<int>(sizes.size()) / slabs),
      sizes(std::move(sizes)),
      owner(all_rows(), -1) {
  for (int slab = 0; slab < slabs; ++slab) {
    int64_t row = 0;
    for (int l = 0; l < groups; ++l) {
      const int group = slab * groups + l;
      for (int i = 0; i < this->sizes[group] && row < rows; ++i, ++row) {
        owner[int64_t{slab} * rows + row] = group;
      }
    }
    used += row;
  }
}

Slabs RandomSlabs(std::mt19937& random, int multiple) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const int slabs = 1 + (below(4) == 0) * (1 + below(2));
  const int groups = 1 + below(below(8) == 0 ? 200 : 12);
  const int alignment = 1 << below(6);
  std::vector<int> sizes;
  int most = 0;
  for (int slab = 0; slab < slabs; ++slab) {
    int sum = 0;
    for (int l = 0; l < groups; ++l) {
      sizes.push_back(below(3) == 0 ? 0 : below(40) / alignment * alignment);
      sum += sizes.back();
    }
    most = std::max(most, sum);
  }
  const int rows = std::max(1, most + below(60) - 10);
  return Slabs(slabs, (rows + multiple - 1) / multiple * multiple, std::move(sizes));
}

bool RunTwice(const std::function<cudaError_t()>& launch, const std::vector<const Memory*>& results,
              const std::string& name) {
  std::vector<std::vector<uint8_t>> before;
  for (int run = 0; run < 2; ++run) {
    for (const Memory* result : results) result->Poison();
    const cudaError_t launched = launch();
    const cudaError_t ended = cudaDeviceSynchronize();
    if (launched != cudaSuccess || ended != cudaSuccess) {
      std::printf("launch: %s, end: %s: %s\n", cudaGetErrorString(launched),
                  cudaGetErrorString(ended), name.c_str());
      if (ended != cudaSuccess) std::exit(4);
      return false;
    }
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<uint8_t> now = results[i]->read();
      if (static_cast<int64_t>(now.size()) != results[i]->bytes()) return false;
      if (run == 0) {
        before.push_back(std::move(now));
      } else if (now != before[i]) {
        std::printf("result %zu differs between runs\n", i);
        return false;
      }
    }
  }
  return true;
}

void Tally::Add(bool right, const std::string& name) {
  ++cases;
  wrong += !right;
  std::printf("%-6s %s\n", right ? "ok" : "WRONG", name.c_str());
}

namespace {

constexpr int kLimitSeconds = 150;  // a hanging kernel ends with the process

void OnAlarm(int) {
  static const char kText[] = "a kernel did not end\n";
  if (write(2, kText, sizeof(kText) - 1) < 0) _exit(125);
  _exit(124);
}

int CheckAll(int count) {
  std::mt19937 random(1);
  Tally tally;
  CheckActivations(random, count, &tally);
  CheckQuantized(random, count, &tally);
  CheckFused(random, count, &tally);
  CheckMoves(random, count, &tally);
  std::printf("%d of %d wrong\n", tally.wrong, tally.cases);
  return tally.wrong > 0;
}

}  // namespace
}  // namespace rows_test

int main(int argc, char** argv) {
  std::signal(SIGALRM, rows_test::OnAlarm);
  alarm(rows_test::kLimitSeconds);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* what = argc > 1 ? argv[1] : "check";
  if (std::strcmp(what, "check") == 0) return rows_test::CheckAll(120);
  if (std::strcmp(what, "small") == 0) return rows_test::CheckAll(6);
  if (std::strcmp(what, "time") == 0) {
    rows_test::TimeAll();
    return 0;
  }
  std::fprintf(stderr, "unknown: %s (check, small or time)\n", what);
  return 2;
}
