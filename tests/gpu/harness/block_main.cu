// Compares block calls whose exchanges overlap products, bit for bit, with calls that run one
// launch at a time: with ranks late at random, with replayed graphs, and with a rank that dies in
// the middle. Also times them.
//
//   block_main check|small|time [ranks]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "block_case.h"

namespace gpu_test {
namespace {

using Results = std::vector<std::vector<uint16_t>>;

GroupSizes SizesOf(const BlockShape& s) {
  return GroupOf(s.ranks, s.experts, s.hidden, s.tokens, BlockCase::Capacity(s), s.top_k,
                 s.element_bytes());
}

// Delays a stream, so that ranks start in another order every time.
__global__ void Delay(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

// The tokens of chunks follow from the lane: rows of every plan fit.
BlockShape ChunksOfLanes(int n) {
  BlockShape shape{"more sums than a lane holds", n, 300, 256, 128, 4 * n, 3, 1000, 0};
  shape.lane_rows = 100 * std::min(3, n - 1);
  return shape;
}

std::vector<BlockShape> Shapes(int n) {
  constexpr auto kNone = ec::GemmScaling::kNone, kBlock = ec::GemmScaling::kBlock;
  constexpr auto kTensor = ec::GemmScaling::kTensor;
  constexpr RowType kF32 = RowType::kF32;
  return {
      {"kept", n, 300, 256, 128, 4 * n, 3, 1.5, 1.5},
      {"kept where it fits", n, 300, 256, 128, 4 * n, 3, 1.5, 1.0},
      {"nothing kept", n, 300, 256, 128, 4 * n, 3, 1.5, 0},
      {"in parts", n, 300, 256, 128, 4 * n, 3, 0.6, 1.0},
      {"all to one rank, in parts", n, 300, 256, 128, 4 * n, 3, 0.6, 0, true},
      {"all to one rank", n, 300, 256, 128, 4 * n, 3, 1000, 0, true},
      {"tiles for all SMs", n, 4096, 1024, 512, 8 * n, 4, 1.5, 1.5},
      {"few tiles of many experts", n, 2048, 512, 256, 64 * n, 8, 1.5, 0},
      {"block scales", n, 300, 512, 256, 4 * n, 3, 1.5, 1.5, false, kBlock},
      {"block scales, in parts", n, 300, 512, 256, 4 * n, 3, 0.6, 1.0, false, kBlock},
      {"block scales, nothing kept", n, 2048, 1024, 512, 8 * n, 4, 1.5, 0, false, kBlock},
      {"block scales, rows sent wide", n, 300, 256, 128, 4 * n, 3, 1.5, 1.0, false, kBlock},
      {"block scales, long rows", n, 300, 8704, 128, 4 * n, 3, 1.5, 1.5, false, kBlock},
      {"tensor scales", n, 2048, 1024, 512, 8 * n, 4, 1.5, 1.0, false, kTensor},
      {"f32, kept where it fits", n, 300, 256, 128, 4 * n, 3, 1.5, 1.0, false, kNone, kF32},
      {"f32, in parts", n, 300, 260, 132, 4 * n, 3, 0.6, 1.0, false, kNone, kF32},
      {"f32, all to one rank", n, 300, 256, 128, 4 * n, 3, 1000, 0, true, kNone, kF32},
      {"f32, tiles for all SMs", n, 4096, 1024, 512, 8 * n, 4, 1.5, 1.5, false, kNone, kF32},
      {"f32, few tiles", n, 2048, 512, 256, 64 * n, 8, 1.5, 0, false, kNone, kF32},
      {"f32, long rows", n, 300, 4352, 128, 4 * n, 3, 1.5, 1.5, false, kNone, kF32},
      // Packed into lanes with four ranks and more.
      {"two slots", n, 300, 256, 128, 4 * n, 2, 1.5, 1.0},
      {"two slots, in parts", n, 300, 256, 128, 4 * n, 2, 0.6, 1.0},
      {"two slots, all to one rank", n, 300, 256, 128, 4 * n, 2, 1000, 0, true},
  };
}

// Counts elements that still are as Poison left them.
int CountPoison(const Results& results, size_t element_bytes) {
  int count = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const size_t halves = i % 5 == 2 ? 2 : element_bytes / 2;  // weights are f32
    for (auto at = results[i].begin(); at != results[i].end(); at += halves) {
      count += std::all_of(at, at + halves, [](uint16_t x) { return x == 0xFFFF; });
    }
  }
  return count;
}

// A hash to compare the results of two builds.
unsigned long long DigestOf(const Results& results) {
  unsigned long long digest = 0xCBF29CE484222325ull;
  for (const auto& array : results) {
    for (uint16_t x : array) digest = (digest ^ x) * 0x100000001B3ull;
  }
  return digest;
}

constexpr const char* kNames[] = {"y", "dx", "d_weights", "dwi", "dwo"};

// Counts arrays that differ.
int Compare(const Results& got, const Results& want) {
  int wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    ++wrong;
    size_t at = 0;
    while (got[i][at] == want[i][at]) ++at;
    std::printf("  rank %zu: %s differs at %zu: %04x, not %04x\n", i / 5, kNames[i % 5], at,
                got[i][at], want[i][at]);
  }
  return wrong;
}

int CountFailures(const World& world, int ranks) {
  int failed = 0;
  for (int r = 0; r < ranks; ++r) {
    const auto& record = world.record(r);
    if (record.valid == 0) continue;
    ++failed;
    std::printf("  rank %d failed: reason %u op %u waiting for %d\n", r, record.reason, record.op,
                record.waiting_for);
  }
  return failed;
}

// Runs calls of all ranks, each late by up to 0.2 ms, without a sync in between.
void RunLate(World& world, BlockCase& block, const Way& way, int rounds) {
  std::mt19937 random(rounds);
  for (int i = 0; i < rounds; ++i) {
    for (int r = 0; r < world.ranks(); ++r) {
      world.Use(r);
      Delay<<<1, 1, 0, world.stream(r)>>>(random() % 200000);
      block.Prepare(r);
      Delay<<<1, 1, 0, world.stream(r)>>>(random() % 200000);
      block.Forward(r, way);
      Delay<<<1, 1, 0, world.stream(r)>>>(random() % 200000);
      block.Backward(r, way);
    }
  }
  world.Synchronize();
}

std::vector<cudaGraphExec_t> Capture(World& world, const std::function<void(int)>& enqueue) {
  std::vector<cudaGraphExec_t> graphs(world.ranks());
  for (int r = 0; r < world.ranks(); ++r) {
    world.Use(r);
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(world.stream(r), cudaStreamCaptureModeThreadLocal));
    enqueue(r);
    CHECK_CUDA(cudaStreamEndCapture(world.stream(r), &graph));
    CHECK_CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
    CHECK_CUDA(cudaGraphUpload(graphs[r], world.stream(r)));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  world.Synchronize();
  return graphs;
}

void Replay(World& world, const std::vector<cudaGraphExec_t>& graphs) {
  for (int r = 0; r < world.ranks(); ++r) {
    world.Use(r);
    CHECK_CUDA(cudaGraphLaunch(graphs[r], world.stream(r)));
  }
}

// True with more than two ranks on a GPU, whose exchanges must all be resident at once.
bool Crowded(int ranks, int gpus) { return ranks > 2 * gpus; }
Way Narrow(bool overlaps) { return {overlaps, {5, 12}, {9, 4}, {{5, 12}, {9, 4}}}; }

int RunShape(const BlockShape& shape, int gpus) {
  World world(SizesOf(shape), gpus);
  BlockCase block(world, shape);
  const bool crowded = Crowded(shape.ranks, gpus);
  RunLate(world, block, crowded ? Narrow(false) : Way{false}, 1);
  const Results want = block.Results();
  int wrong = CountPoison(want, shape.element_bytes()) != 0;
  std::vector<Way> ways{crowded ? Narrow(true) : Way{true}};
  // Also grids that leave an odd number of SMs.
  if (!crowded) ways.push_back({true, {5, 12}, {9, 4}});
  for (const Way& way : ways) {
    block.Poison();
    RunLate(world, block, way, 4);
    wrong += Compare(block.Results(), want);
  }
  block.Poison();
  const auto graphs = Capture(world, [&](int r) { block.Enqueue(r, ways[0]); });
  for (int i = 0; i < 10; ++i) Replay(world, graphs);
  world.Synchronize();
  wrong += Compare(block.Results(), want);
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  block.Poison();
  RunLate(world, block, ways[0], 1);  // captured streams serve again
  wrong += Compare(block.Results(), want) + CountFailures(world, shape.ranks);
  std::printf("%s %016llx %s\n", wrong == 0 ? "ok  " : "FAIL", DigestOf(want), shape.name);
  std::fflush(stdout);
  return wrong;
}

// Counts y and dx that differ between a call in chunks and a call of all tokens at once.
int RunChunksOfLanes(BlockShape shape, int gpus) {
  Results found[2];
  for (Results& each : found) {
    World world(SizesOf(shape), gpus);
    BlockCase block(world, shape);
    RunLate(world, block, Crowded(shape.ranks, gpus) ? Narrow(false) : Way{false}, 1);
    each = block.Results();
    shape.lane_rows = INT32_MAX;
  }
  // Gradients of weights are rounded once a chunk.
  for (size_t i = 0; i < found[0].size(); ++i) {
    if (i % 5 > 1) found[0][i] = found[1][i];
  }
  const int wrong = Compare(found[0], found[1]);
  std::printf("%s chunks give the bits of a call of all tokens\n", wrong == 0 ? "ok  " : "FAIL");
  return wrong;
}

constexpr uint64_t kShortBudgetNs = 50'000'000ull;

// Counts faults after the last rank died: the others' calls must end at `op`, in time.
int CountSurvivors(World& world, ep_runtime::OpCode op, double* ms) {
  const auto started = std::chrono::steady_clock::now();
  world.Synchronize();
  *ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - started).count();
  int wrong = *ms > 5000;
  for (int r = 0; r < world.ranks() - 1; ++r) {
    const auto& record = world.record(r);
    const bool timeout = record.reason == static_cast<uint32_t>(ec::FailReason::kTimeout) &&
                         record.op == static_cast<uint32_t>(op);
    if (!timeout) std::printf("  rank %d: reason %u op %u\n", r, record.reason, record.op);
    wrong += !timeout;
  }
  return wrong;
}

// Counts arrays of the living ranks, from each rank's `first` on, that are not all NaN.
int CountFinite(const Results& found, int ranks, int first, size_t element_bytes) {
  int finite = 0;
  for (int i = 0; i < (ranks - 1) * 5; ++i) {
    if (i % 5 < first) continue;
    const size_t halves = i % 5 == 2 ? 2 : element_bytes / 2;  // weights are f32
    const auto is_nan = [&](size_t at) {                       // the upper half decides
      return halves == 2 && at % 2 == 0 ? found[i][at] == 0 : found[i][at] == 0x7FC0;
    };
    size_t at = 0;
    while (at < found[i].size() && is_nan(at)) ++at;
    if (at == found[i].size()) continue;
    ++finite;
    std::printf("  rank %d: %s is %04x at %zu, not NaN\n", i / 5, kNames[i % 5], found[i][at], at);
  }
  return finite;
}

// Counts faults in the next generation.
int RunNext(World& world, const BlockShape& shape) {
  world.Form(2, 20'000'000'000ull);
  BlockCase again(world, shape);
  RunLate(world, again, {false}, 1);
  const Results want = again.Results();
  again.Poison();
  RunLate(world, again, {true}, 2);
  return Compare(again.Results(), want) + CountFailures(world, shape.ranks);
}

int SayDeath(const BlockShape& shape, const char* where, int wrong, double ms) {
  std::printf("%s %s: a rank dies in %s, left after %.1f ms; next generation works\n",
              wrong == 0 ? "ok  " : "FAIL", shape.name, where, ms);
  std::fflush(stdout);
  return wrong;
}

// The last rank dies after backward's first exchange. The others' next exchange, which overlaps a
// product, must end in time, and so must everything after it, without any result that looks like a
// gradient.
int RunDeath(const BlockShape& shape, int gpus) {
  const int n = shape.ranks;
  World world(SizesOf(shape), gpus, kShortBudgetNs);
  BlockCase block(world, shape);
  const Way way{true};
  for (int r = 0; r < n; ++r) {
    block.Prepare(r);
    block.Forward(r, way);
    if (r < n - 1) {
      block.Backward(r, way);
    } else {
      block.DispatchGrads(r);
    }
  }
  double ms = 0;
  int wrong = CountSurvivors(world, ep_runtime::OpCode::kDispatch, &ms);
  wrong += CountFinite(block.Results(), n, 1, shape.element_bytes());
  return SayDeath(shape, "backward", wrong + RunNext(world, shape), ms);
}

// The last rank dies after the first chunk of its tokens. All results of the others' two calls must
// be NaN.
int RunDeathInParts(const BlockShape& shape, int gpus) {
  const int n = shape.ranks;
  World world(SizesOf(shape), gpus, kShortBudgetNs);
  BlockCase block(world, shape);
  for (int r = 0; r < n; ++r) {
    block.Prepare(r);
    if (r < n - 1) {
      block.Forward(r, {true});
      block.Backward(r, {true});
    } else {
      block.ForwardFirstPart(r);
    }
  }
  double ms = 0;
  int wrong = CountSurvivors(world, ep_runtime::OpCode::kPrepare, &ms);
  wrong += CountFinite(block.Results(), n, 0, shape.element_bytes());
  return SayDeath(shape, "the second part", wrong + RunNext(world, shape), ms);
}

constexpr int kIterations = 6;
constexpr int kRepeats = 5;

// Median ms of a call, with the slowest rank each time.
double Time(World& world, bool graphs, const std::function<void(int)>& enqueue) {
  const int n = world.ranks();
  std::vector<cudaEvent_t> before(n), after(n);
  for (int r = 0; r < n; ++r) {
    world.Use(r);
    CHECK_CUDA(cudaEventCreate(&before[r]));
    CHECK_CUDA(cudaEventCreate(&after[r]));
  }
  const auto repeat = [&](int r) {
    for (int i = 0; i < kIterations; ++i) enqueue(r);
  };
  std::vector<cudaGraphExec_t> replayed;
  if (graphs) replayed = Capture(world, repeat);
  std::vector<double> times;
  for (int i = 0; i <= kRepeats; ++i) {
    // Enqueue it after other graphs, so that the time has no host launches.
    for (int pass = 0; pass < 2; ++pass) {
      for (int r = 0; r < n; ++r) {
        world.Use(r);
        if (pass == 1) CHECK_CUDA(cudaEventRecord(before[r], world.stream(r)));
        if (graphs) {
          CHECK_CUDA(cudaGraphLaunch(replayed[r], world.stream(r)));
        } else {
          repeat(r);
        }
        if (pass == 1) CHECK_CUDA(cudaEventRecord(after[r], world.stream(r)));
      }
    }
    world.Synchronize();
    float slowest = 0;
    for (int r = 0; r < n; ++r) {
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, before[r], after[r]));
      slowest = std::max(slowest, ms);
    }
    if (i > 0) times.push_back(slowest / kIterations);
  }
  for (cudaGraphExec_t graph : replayed) cudaGraphExecDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int TimeShape(const BlockShape& shape, int gpus) {
  World world(SizesOf(shape), gpus);
  BlockCase block(world, shape);
  static const char* const kScales[] = {"none", "tensor", "block"};
  std::printf(
      "== %s: T=%d H=%d M=%d E=%d K=%d, %d ranks, %g shares kept, %s rows, scales %s: ms of a "
      "call\n",
      shape.name, shape.tokens, shape.hidden, shape.inner, shape.experts, shape.top_k, shape.ranks,
      shape.kept, shape.type == RowType::kF32 ? "f32" : "bf16",
      kScales[static_cast<int>(shape.scaling)]);
  for (int r = 0; r < shape.ranks; ++r) block.Prepare(r);
  const double forward = Time(world, true, [&](int r) { block.Forward(r, {false}); });
  std::printf("forward                                      %.3f\n", forward);
  const auto print = [&](const char* name, const Way& way, bool graphs) {
    const double ms = Time(world, graphs, [&](int r) { block.Backward(r, way); });
    std::printf("backward %-9s dispatch %2d+%2d combine %2d+%2d %s %.3f\n", name,
                way.dispatch.push_blocks, way.dispatch.place_blocks, way.combine.reduce_blocks,
                way.combine.sum_blocks, graphs ? "graph" : "     ", ms);
    std::fflush(stdout);
  };
  for (bool graphs : {true, false}) {
    print("in turn", {false}, graphs);
    print("overlaps", {true}, graphs);
  }
  for (const Way& way :
       {Way{true, {5, 11}, {10, 6}}, Way{true, {7, 17}, {14, 10}}, Way{true, {9, 23}, {19, 13}},
        Way{true, {15, 33}, {28, 20}}, Way{true, {20, 44}, {38, 26}}}) {
    print("overlaps", way, true);
  }
  for (const ec::ExchangeGrids& alone :
       {ec::ExchangeGrids{{12, 28}, {24, 16}}, ec::ExchangeGrids{{28, 68}, {58, 38}},
        ec::ExchangeGrids{{30, 98}, {76, 52}}}) {
    const Way way{true, {12, 28}, {24, 16}, alone};
    const double ms = Time(world, true, [&](int r) { block.Forward(r, way); });
    std::printf("forward, %d blocks alone %.3f\n",
                alone.dispatch.push_blocks + alone.dispatch.place_blocks, ms);
    print("overlaps", way, true);
  }
  print("in turn", {false}, true);
  return CountFailures(world, shape.ranks);
}

}  // namespace

int Main(const std::string& what, int ranks, int gpus) {
  int wrong = 0;
  if (what == "check") {
    const std::vector<BlockShape> shapes = Shapes(ranks);
    for (const BlockShape& shape : shapes) wrong += RunShape(shape, gpus);
    if (ranks > 1) {
      wrong += RunShape(ChunksOfLanes(ranks), gpus);
      wrong += RunChunksOfLanes(ChunksOfLanes(ranks), gpus);
    }
    if (ranks > 1 && !Crowded(ranks, gpus)) {
      for (int i : {6, 17}) wrong += RunDeath(shapes[i], gpus);
      for (int i : {3, 9, 15}) wrong += RunDeathInParts(shapes[i], gpus);
    }
  }
  if (what == "small") {  // for sanitizers: a call in one pass, and one in chunks
    const std::vector<BlockShape> shapes = Shapes(ranks);
    for (int i : {0, 3, 8, 9, 14, 15}) wrong += RunShape(shapes[i], gpus);
  }
  if (what == "time") {
    wrong += TimeShape({"8-layers", ranks, 8192, 2048, 1024, 64, 8, 1.5, 1.25}, gpus);
    wrong += TimeShape({"8-layers", ranks, 8192, 2048, 1024, 64, 8, 1.5, 0}, gpus);
    wrong += TimeShape({"deepseek-like", ranks, 4096, 7168, 2048, 64, 8, 1.5, 1.25}, gpus);
    constexpr auto kNone = ec::GemmScaling::kNone;
    for (double kept : {1.25, 0.0}) {
      wrong += TimeShape(
          {"8-layers", ranks, 8192, 2048, 1024, 64, 8, 1.5, kept, false, kNone, RowType::kF32},
          gpus);
    }
    for (auto scaling : {ec::GemmScaling::kTensor, ec::GemmScaling::kBlock}) {
      wrong +=
          TimeShape({"8-layers", ranks, 8192, 2048, 1024, 64, 8, 1.5, 1.25, false, scaling}, gpus);
      wrong += TimeShape(
          {"deepseek-like", ranks, 4096, 7168, 2048, 64, 8, 1.5, 1.25, false, scaling}, gpus);
    }
  }
  std::printf("%s: %d wrong, %d ranks on %d GPUs\n", wrong == 0 ? "passed" : "FAILED", wrong, ranks,
              gpus);
  return wrong == 0 ? 0 : 1;
}

}  // namespace gpu_test

int main(int argc, char** argv) { return gpu_test::Run(gpu_test::Main, argc, argv); }
