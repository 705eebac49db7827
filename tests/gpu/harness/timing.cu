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
        " warps " + std::to_string(grid.warps) + " buffers " + std::to_string(grid.buffers));
  }
  // Before what the check looks at is made.
  void DispatchNarrow(const DispatchGrid& grid) {
    const double us = timed_.Time([&](int r) { timed_.DispatchNarrow(r, grid); });
    Print("dispatch of 8-bit rows with scales, warps " + std::to_string(grid.warps) + " buffers " +
              std::to_string(grid.buffers),
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
    Print("prepare", std::to_string(blocks), timed_.Time([&](int r) { timed_.Prepare(r, blocks); }),
          0);
  }
  // Last, because the check looks at its results.
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

 private:
  static void Print(const std::string& what, const std::string& blocks, double us, double bytes) {
    std::printf("%s %s: %.1f us", what.c_str(), blocks.c_str(), us);
    if (bytes > 0) std::printf(" %.1f GB/s", bytes / us / 1e3);
    std::printf("\n");
    std::fflush(stdout);
  }
  void Row(const std::string& what, int a, int b, double us, const std::string& more) {
    std::printf("%s%s %d+%d: %.1f us %.1f GB/s", what.c_str(), more.c_str(), a, b, us,
                timed_.RemoteBytes() / us / 1e3);
    // The nearest number of blocks that was timed and is not higher.
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
    table.Dispatch({g.first, g.second, 7, 2});
  }
  table.Dispatch({10, 30, 5, 3});
  table.Dispatch({10, 30, 5, 2});
  table.Dispatch({8, 24, 7, 3});
  table.Dispatch({10, 30, 7, 3});
  table.Dispatch({12, 36, 7, 3});
  table.Dispatch({10, 30, 6, 4});
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

// What changes with combine's blocks, in seconds.
int TimeQuick(World& world, int tokens) {
  TimedCase timed(world, tokens, Routing::kUniform);
  PrintHead(timed, "uniform", world.ranks());
  Table table(timed);
  table.Prepare(32);
  table.Ceilings({32, 40, 48});
  for (const DispatchGrid& grid : {DispatchGrid{12, 28}, {16, 24}, {20, 44}}) {
    table.DispatchNarrow(grid);
    table.Dispatch(grid);
  }
  for (const auto& g : {std::pair<int, int>{20, 12},
                        {24, 8},
                        {24, 16},
                        {28, 12},
                        {30, 10},
                        {32, 8},
                        {36, 4},
                        {28, 20},
                        {34, 14},
                        {36, 12},
                        {40, 8}}) {
    table.Combine({g.first, g.second});
  }
  table.Combine({}, true);
  table.Combine({}, false, CombinePrecision::kExact);
  table.Combine({}, false, CombinePrecision::kFp8);
  table.DispatchBwd({});
  // The check looks at the fast sums.
  table.Combine({});
  return timed.Check();
}

// Rows of a few KB, of 16 bits and of 8: how many warps and buffers they want.
int TimeWarps(World& world, int width) {
  TimedCase timed(world, 8192, Routing::kUniform, width);
  PrintHead(timed, "uniform", world.ranks());
  Table table(timed);
  table.Prepare(32);
  table.Ceilings({40, 64, 128});
  for (const auto& g : {std::pair<int, int>{12, 28}, {20, 20}, {20, 44}, {30, 98}}) {
    for (const auto& w : {std::pair<int, int>{7, 2}, {10, 2}, {14, 2}, {14, 4}}) {
      const DispatchGrid grid{g.first, g.second, w.first, w.second};
      table.DispatchNarrow(grid);
      table.Dispatch(grid);
    }
  }
  for (const auto& g : {std::pair<int, int>{24, 16}, {38, 26}, {80, 48}}) {
    table.Combine({g.first, g.second});
  }
  return timed.Check();
}

int TimeDecode(World& world) {
  TimedCase timed(world, 128, Routing::kUniform);
  PrintHead(timed, "uniform", world.ranks());
  Table table(timed);
  for (int blocks : {8, 16, 32}) table.Prepare(blocks);
  for (const DispatchGrid& grid : {DispatchGrid{}, {4, 12}, {8, 8}, {20, 20}, {16, 48}}) {
    table.Dispatch(grid);
  }
  for (const CombineGrid& grid : {CombineGrid{}, {8, 8}, {32, 32}}) table.Combine(grid);
  table.Pair({4, 12}, {8, 8});
  table.Pair({20, 20}, {24, 16});
  table.Pair({16, 48}, {32, 32});
  table.Pair({}, {});
  return timed.Check();
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
  if (what == "quick") {
    for (int tokens : {8192, 4096, 128}) wrong += TimeQuick(world, tokens);
    return wrong;
  }
  wrong += TimeUniform(world, 8192);
  wrong += TimeUniform(world, 4096) + TimeDecode(world);
  return wrong + TimeSkewed(world, Routing::kZipf, "Zipf") +
         TimeSkewed(world, Routing::kOneRank, "all-to-one");
}

}  // namespace gpu_test
