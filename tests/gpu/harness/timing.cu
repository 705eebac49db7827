// Times of prepare, dispatch and combine.
#include <map>

#include "timed_case.h"
#include "timing.h"

namespace gpu_test {
namespace {

const char* NameOf(CombinePrecision precision) {
  switch (precision) {
    case CombinePrecision::kExact:
      return " exact";
    case CombinePrecision::kFp8:
      return " 8-bit sums";
    case CombinePrecision::kFast:
      break;
  }
  return "";
}

using ec::CombineGrid;
using ec::DispatchGrid;

// Prints one line per case, with its share of the ceiling at the same number of blocks.
class Table {
 public:
  explicit Table(TimedCase& timed) : timed_(timed) {}

  void Ceilings(const std::vector<int>& totals) {
    for (int blocks : totals) {
      const double us = timed_.Time([&](int r) { timed_.Ceiling(r, blocks, 15); });
      ceilings_[blocks] = us;
      Print("ceiling", std::to_string(blocks), us, timed_.RemoteBytes());
    }
    const double us = timed_.Time([&](int r) { timed_.Ceiling(r, 40, 15, true); });
    Print("ceiling, a copy per expert", "40", us, timed_.CopiedBytes());
  }
  void Dispatch(const DispatchGrid& grid) {
    const double us = timed_.Time([&](int r) { timed_.Dispatch(r, grid); });
    Row("dispatch", grid.push_blocks, grid.place_blocks, us,
        " warps " + std::to_string(grid.warps));
  }
  // Runs before the inputs of the check are made.
  void DispatchNarrow(const DispatchGrid& grid) {
    const double us = timed_.Time([&](int r) { timed_.DispatchNarrow(r, grid); });
    Print("dispatch of 8-bit rows with scales, warps " + std::to_string(grid.warps),
          std::to_string(grid.push_blocks) + "+" + std::to_string(grid.place_blocks), us,
          timed_.RemoteBytes() * (1 + 4.0 / 128) / 2);
  }
  void Combine(const CombineGrid& grid, bool weighted = false,
               CombinePrecision precision = CombinePrecision::kFast) {
    const double us = timed_.Time([&](int r) { timed_.Combine(r, grid, weighted, precision); });
    Row("combine", grid.reduce_blocks, grid.sum_blocks, us,
        std::string(weighted ? " weighted" : "") + NameOf(precision));
  }
  void DispatchBwd(const CombineGrid& grid) {
    const double us = timed_.Time([&](int r) { timed_.DispatchBwd(r, grid); });
    Row("dispatch backward", grid.reduce_blocks, grid.sum_blocks, us, "");
  }
  void CombineBwd(const DispatchGrid& grid, bool weighted) {
    const double us = timed_.Time([&](int r) { timed_.CombineBwd(r, grid, weighted); });
    Row("combine backward", grid.push_blocks, grid.place_blocks, us,
        weighted ? " with d_weights" : " plain");
  }
  void Prepare(int blocks) {
    for (bool spread : {false, true}) {
      const double us = timed_.Time([&](int r) { timed_.Prepare(r, blocks, spread); });
      Print(spread ? "prepare with copies" : "prepare", std::to_string(blocks), us, 0);
    }
  }
  // Runs last, because the check reads its results.
  void Pair(const DispatchGrid& dispatch, const CombineGrid& combine) {
    const double us = timed_.Time([&](int r) {
      timed_.Dispatch(r, dispatch);
      timed_.Combine(r, combine, false, CombinePrecision::kFast);
    });
    Print("dispatch + combine",
          std::to_string(dispatch.push_blocks) + "+" + std::to_string(dispatch.place_blocks) +
              ", " + std::to_string(combine.reduce_blocks) + "+" +
              std::to_string(combine.sum_blocks),
          us, 0);
  }
  // Runs before the inputs of the check are made.
  void Round(const DispatchGrid& dispatch, const CombineGrid& combine) {
    const auto round = [&](int r) {
      timed_.Prepare(r, 32);
      timed_.Dispatch(r, dispatch);
      timed_.CombineReceived(r, combine);
    };
    WithEnergy("prepare + dispatch + combine", round);
  }
  void DispatchWithEnergy(const DispatchGrid& grid) {
    WithEnergy("dispatch", [&](int r) { timed_.Dispatch(r, grid); });
  }

 private:
  void WithEnergy(const char* what, const std::function<void(int)>& enqueue) {
    double mj = 0;
    const double us = timed_.Time(enqueue, &mj);
    std::printf("%s: %.1f us %.2f mJ\n", what, us, mj);
    std::fflush(stdout);
  }
  static void Print(const std::string& what, const std::string& blocks, double us, double bytes) {
    std::printf("%s %s: %.1f us", what.c_str(), blocks.c_str(), us);
    if (bytes > 0) std::printf(" %.1f GB/s", bytes / us / 1e3);
    std::printf("\n");
    std::fflush(stdout);
  }
  void Row(const std::string& what, int a, int b, double us, const std::string& more) {
    std::printf("%s%s %d+%d: %.1f us %.1f GB/s", what.c_str(), more.c_str(), a, b, us,
                timed_.RemoteBytes() / us / 1e3);
    // The nearest timed number of blocks that is not higher.
    const auto above = ceilings_.upper_bound(a + b);
    if (above != ceilings_.begin()) {
      std::printf(" %.1f%% of ceiling", 100 * std::prev(above)->second / us);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  TimedCase& timed_;
  std::map<int, double> ceilings_;
};

void PrintHead(const TimedCase& timed, const char* routing, int ranks) {
  std::printf("== T=%d H=%d bf16 K=%d E=%d, %s routing, %d ranks, %.1f MB remote per rank\n",
              timed.tokens(), timed.width(), kTopK, kExperts, routing, ranks,
              timed.RemoteBytes() / 1e6);
}

int TimeUniform(World& world, int tokens) {
  TimedCase timed(world, tokens, Routing::kUniform);
  PrintHead(timed, "uniform", world.ranks());
  Table table(timed);
  for (int blocks : {16, 32, 64}) table.Prepare(blocks);
  table.Ceilings({16, 24, 32, 40, 44, 48, 64});
  for (const auto& g : {std::pair<int, int>{6, 18},
                        {8, 16},
                        {8, 24},
                        {8, 32},
                        {10, 30},
                        {12, 28},
                        {20, 20},
                        {12, 36},
                        {16, 48}}) {
    table.Dispatch({g.first, g.second});
  }
  for (const auto& g : {std::pair<int, int>{16, 8},
                        {20, 12},
                        {24, 16},
                        {28, 12},
                        {30, 10},
                        {32, 8},
                        {28, 20},
                        {30, 18},
                        {34, 14}}) {
    table.Combine({g.first, g.second});
  }
  table.Combine({}, true);
  table.Combine({}, false, CombinePrecision::kExact);
  table.Combine({}, false, CombinePrecision::kFp8);
  table.Combine({}, true, CombinePrecision::kExact);
  table.DispatchBwd({});
  for (const DispatchGrid& grid : {DispatchGrid{}, {6, 34}, {12, 28}, {20, 20}, {12, 36}}) {
    table.CombineBwd(grid, true);
    table.CombineBwd(grid, false);
  }
  table.Pair({}, {});
  return timed.Check();
}

// Times rows of a few KB, in 16 bits and in 8, with different numbers of warps.
int TimeWarps(World& world, int width) {
  TimedCase timed(world, 8192, Routing::kUniform, width);
  PrintHead(timed, "uniform", world.ranks());
  Table table(timed);
  table.Prepare(32);
  table.Ceilings({40, 64, 128});
  for (const auto& g : {std::pair<int, int>{12, 28}, {20, 20}, {20, 44}, {30, 98}}) {
    for (int warps : {7, 10, 14}) {
      const DispatchGrid grid{g.first, g.second, warps};
      table.DispatchNarrow(grid);
      table.Dispatch(grid);
    }
  }
  for (const auto& g : {std::pair<int, int>{24, 16}, {38, 26}, {80, 48}}) {
    table.Combine({g.first, g.second});
  }
  return timed.Check();
}

// Times few tokens, as calls of a group of alignment 8, and dispatch as in block calls.
int TimeFew(World& world) {
  int wrong = 0;
  for (int tokens : {1, 8, 32, 128}) {
    TimedCase timed(world, tokens, Routing::kUniform, kWidth, 8, 8);
    PrintHead(timed, "uniform", world.ranks());
    Table table(timed);
    table.Prepare(32);
    table.Round({20, 44}, {38, 26});
    table.Dispatch({20, 44});
    table.Combine({38, 26});
    wrong += timed.Check();
  }
  for (int tokens : {128, 4096, 8192}) {
    TimedCase timed(world, tokens, Routing::kUniform, kWidth, 128, 1);
    PrintHead(timed, "uniform, rows side by side,", world.ranks());
    Table table(timed);
    table.Prepare(32);
    table.DispatchWithEnergy({20, 44});
    table.Combine({38, 26});
    wrong += timed.Check();
  }
  return wrong;
}

int TimeSkewed(World& world, Routing routing, const char* name) {
  TimedCase timed(world, 8192, routing);
  PrintHead(timed, name, world.ranks());
  Table table(timed);
  table.Prepare(32);
  table.Ceilings({40});
  table.Dispatch({});
  table.Combine({});
  table.Pair({}, {});
  return timed.Check();
}

}  // namespace

int TimeAll(int ranks, int gpus, const std::string& what) {
  World world(GroupOf(ranks, kExperts, kWidth, 8192, 1, kTopK, 2), gpus);
  int wrong = 0;
  if (what == "warps") {
    for (int width : {2048, 7168}) wrong += TimeWarps(world, width);
    return wrong;
  }
  if (what == "few") return TimeFew(world);
  wrong += TimeUniform(world, 8192) + TimeUniform(world, 4096) + TimeFew(world);
  return wrong + TimeSkewed(world, Routing::kZipf, "Zipf") +
         TimeSkewed(world, Routing::kOneRank, "all-to-one");
}

}  // namespace gpu_test
