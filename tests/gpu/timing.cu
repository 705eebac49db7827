#include <algorithm>
#include <functional>
#include <thread>

#include "case_runner.h"
#include "cuda/bench_kernels.h"
#include "timing.h"

namespace gpu_test {
namespace {

constexpr int kWidth = 7168;
constexpr int kTopK = 8;
constexpr int kExperts = 256;
constexpr int kIterations = 10;
constexpr int kRepeats = 5;

// Any element of any array, on both sides: bf16 of size 1 to 2, either sign.
__host__ __device__ inline uint16_t ValueAt(uint32_t what, uint32_t row, uint32_t column) {
  uint32_t x = what * 0x9E3779B1u ^ row * 0x85EBCA77u ^ column * 0xC2B2AE3Du;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 13;
  return static_cast<uint16_t>(0x3F80u | (x & 0x807Fu));
}

__global__ void FillValues(uint16_t* out, uint32_t what, int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int h = threadIdx.x; h < kWidth; h += blockDim.x) {
      out[row * kWidth + h] = ValueAt(what, static_cast<uint32_t>(row), h);
    }
  }
}

enum : uint32_t { kTokens = 100, kExpertOut = 200 };

class Bench {
 public:
  Bench(World& world, int tokens) : world_(world), n_(world.ranks()), data_(world.ranks()) {
    const int local = kExperts / n_;
    const int64_t rows = int64_t{n_} * tokens * std::min(kTopK, local);
    const auto capacity = static_cast<int>(ep_runtime::AlignUp(rows + 127 * local, 128));
    c_ = {"bench", n_,       tokens,         kWidth, kTopK, kExperts,
          128,     capacity, RowType::kBF16, 0,      false, false};
    std::mt19937 random(tokens);
    for (int r = 0; r < n_; ++r) idx_.push_back(RandomExperts(random));
    routed_ = Route(c_, idx_);
    for (int r = 0; r < n_; ++r) Fill(r);
    world_.Synchronize();
  }

  ec::CallSizes Sizes() const { return {c_.tokens, kTopK, c_.capacity, kExperts / n_, kWidth}; }
  double RemoteBytes() const { return remote_rows_ * kWidth * 2.0 / n_; }

  void Prepare(int r, int blocks) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchPrepare(world_.stream(r), {world_.group(r),
                                                    {1, nullptr, 0},
                                                    Sizes(),
                                                    kExperts,
                                                    128,
                                                    d.idx->as<int32_t>(),
                                                    d.plan->buffers<int32_t>(),
                                                    nullptr,
                                                    blocks}));
  }
  void Dispatch(int r, const ec::DispatchGrid& grid) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchDispatch(world_.stream(r), {world_.group(r),
                                                     {1, nullptr, 0},
                                                     Sizes(),
                                                     RowType::kBF16,
                                                     kWidth * 2,
                                                     d.tokens->as<void>(),
                                                     d.topk_weights->as<float>(),
                                                     d.plan->buffers<const int32_t>(),
                                                     d.recv->as<void>(),
                                                     d.recv_weights->as<float>(),
                                                     grid}));
  }
  void Combine(int r, const ec::CombineGrid& grid, bool weighted, bool exact) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchCombine(world_.stream(r),
                                 {world_.group(r),
                                  {1, nullptr, 0},
                                  ep_runtime::OpCode::kCombine,
                                  Sizes(),
                                  RowType::kBF16,
                                  kWidth * 2,
                                  exact,
                                  ep_runtime::LaneLayout(world_.sizes()).source_rows_bytes,
                                  d.expert_out->as<void>(),
                                  weighted ? d.recv_weights->as<float>() : nullptr,
                                  nullptr,
                                  d.plan->buffers<const int32_t>(),
                                  d.out->as<void>(),
                                  nullptr,
                                  grid}));
  }
  void CombineBwd(int r, const ec::DispatchGrid& grid) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchCombineBwd(world_.stream(r), {world_.group(r),
                                                       {1, nullptr, 0},
                                                       Sizes(),
                                                       RowType::kBF16,
                                                       kWidth * 2,
                                                       d.tokens->as<void>(),
                                                       d.expert_out->as<void>(),
                                                       d.recv_weights->as<float>(),
                                                       d.plan->buffers<const int32_t>(),
                                                       d.recv->as<void>(),
                                                       d.d_weights->as<float>(),
                                                       grid}));
  }
  void Ceiling(int r, int blocks, int warps) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchCeiling(
        world_.stream(r),
        {world_.group(r), d.tokens->as<void>(), d.d_topk->as<int32_t>(), d.verdict->as<int32_t>(),
         c_.tokens, kTopK, kWidth * 2, blocks, warps, d.d_weights->as<int32_t>()}));
  }

  // Median us of one iteration, the slowest rank each time; replays captured iterations.
  double Time(const std::function<void(int)>& enqueue) {
    std::vector<cudaGraphExec_t> graphs(n_);
    std::vector<cudaEvent_t> before(n_), after(n_);
    for (int r = 0; r < n_; ++r) {
      world_.Use(r);
      cudaGraph_t graph;
      CHECK_CUDA(cudaEventCreate(&before[r]));
      CHECK_CUDA(cudaEventCreate(&after[r]));
      CHECK_CUDA(cudaStreamBeginCapture(world_.stream(r), cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kIterations; ++i) enqueue(r);
      CHECK_CUDA(cudaStreamEndCapture(world_.stream(r), &graph));
      CHECK_CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
      CHECK_CUDA(cudaGraphUpload(graphs[r], world_.stream(r)));
      CHECK_CUDA(cudaGraphDestroy(graph));
    }
    world_.Synchronize();
    std::vector<double> times;
    for (int i = 0; i <= kRepeats; ++i) {
      // A graph ahead of the timed one, so that host launches are not in the time.
      for (int pass = 0; pass < 2; ++pass) {
        for (int r = 0; r < n_; ++r) {
          world_.Use(r);
          if (pass == 1) CHECK_CUDA(cudaEventRecord(before[r], world_.stream(r)));
          CHECK_CUDA(cudaGraphLaunch(graphs[r], world_.stream(r)));
          if (pass == 1) CHECK_CUDA(cudaEventRecord(after[r], world_.stream(r)));
        }
      }
      world_.Synchronize();
      float slowest = 0;
      for (int r = 0; r < n_; ++r) {
        float ms = 0;
        CHECK_CUDA(cudaEventElapsedTime(&ms, before[r], after[r]));
        slowest = std::max(slowest, ms);
      }
      if (i > 0) times.push_back(slowest * 1e3 / kIterations);
    }
    for (int r = 0; r < n_; ++r) {
      world_.Use(r);
      cudaGraphExecDestroy(graphs[r]);
      cudaEventDestroy(before[r]);
      cudaEventDestroy(after[r]);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  // Whole plans, and a sample of rows.
  int Check() {
    int wrong = 0;
    for (int r = 0; r < n_; ++r) {
      world_.Use(r);
      const RankPlan& want = routed_.plans[r];
      const Plan& got = *data_[r].plan;
      wrong += got.dst_row->read<int32_t>() != want.dst_row;
      wrong += got.staged_row->read<int32_t>() != want.staged_row;
      wrong += got.staged_start->read<int32_t>() != want.staged_start;
      for (int row = r; row < routed_.zones[r]; row += 211) wrong += !GoodRow(r, row);
      for (int t = r; t < c_.tokens; t += 97) wrong += !GoodToken(r, t);
    }
    if (wrong != 0) std::printf("  %d samples wrong\n", wrong);
    return wrong;
  }

 private:
  Ints RandomExperts(std::mt19937& random) {
    Ints idx(c_.tokens * kTopK);
    for (int t = 0; t < c_.tokens; ++t) {
      int32_t* at = &idx[t * kTopK];
      for (int k = 0; k < kTopK; ++k) {
        do {
          at[k] = static_cast<int32_t>(random() % kExperts);
        } while (std::find(at, at + k, at[k]) != at + k);
      }
    }
    return idx;
  }

  void Fill(int r) {
    world_.Use(r);
    RankData& d = data_[r];
    const int64_t row_bytes = kWidth * 2;
    d.idx = std::make_unique<Memory>(idx_[r]);
    d.tokens = std::make_unique<Memory>(c_.tokens * row_bytes);
    d.out = std::make_unique<Memory>(c_.tokens * row_bytes);
    d.recv = std::make_unique<Memory>(c_.capacity * row_bytes);
    d.expert_out = std::make_unique<Memory>(c_.capacity * row_bytes);
    d.recv_weights = std::make_unique<Memory>(c_.capacity * 4);
    d.d_weights = std::make_unique<Memory>(c_.capacity * 4);
    d.topk_weights = std::make_unique<Memory>(Floats(c_.tokens * kTopK, 0.5f));
    d.plan = std::make_unique<Plan>(c_);
    FillValues<<<1024, 256>>>(d.tokens->as<uint16_t>(), kTokens + r, c_.tokens);
    FillValues<<<1024, 256>>>(d.expert_out->as<uint16_t>(), kExpertOut + r, c_.capacity);
    CHECK_CUDA(cudaGetLastError());
    // The ceiling's destinations: once per rank.
    Ints rank(c_.tokens * kTopK, -1), row(c_.tokens * kTopK, -1), next(n_, 0);
    for (int t = 0; t < c_.tokens; ++t) {
      uint32_t seen = 0;
      for (int k = 0; k < kTopK; ++k) {
        const int to = routed_.plans[r].dst_rank[t * kTopK + k];
        if (to < 0 || (seen >> to & 1) != 0) continue;
        seen |= 1u << to;
        rank[t * kTopK + k] = to;
        row[t * kTopK + k] = next[to]++;
        remote_rows_ += to != r;
      }
    }
    d.d_topk = std::make_unique<Memory>(rank);
    d.verdict = std::make_unique<Memory>(row);
  }

  std::vector<uint16_t> ReadRow(const Buffer& buffer, int64_t row) {
    std::vector<uint16_t> out(kWidth);
    CHECK_CUDA(cudaMemcpy(out.data(), buffer->as<uint16_t>() + row * kWidth, kWidth * 2,
                          cudaMemcpyDeviceToHost));
    return out;
  }
  bool GoodRow(int r, int row) {
    const Row& from = routed_.rows[r][row];
    const auto got = ReadRow(data_[r].recv, row);
    for (int h = 0; h < kWidth; ++h) {
      const uint16_t want = from.source < 0 ? 0 : ValueAt(kTokens + from.source, from.token, h);
      if (got[h] != want) return false;
    }
    return true;
  }
  bool GoodToken(int r, int t) {
    const auto got = ReadRow(data_[r].out, t);
    const RankPlan& plan = routed_.plans[r];
    for (int h = 0; h < kWidth; ++h) {
      float sum = 0;
      for (int rank = 0; rank < n_; ++rank) {
        float part = 0;
        for (int k = 0; k < kTopK; ++k) {
          if (plan.dst_rank[t * kTopK + k] != rank) continue;
          const uint16_t bits = ValueAt(kExpertOut + rank, plan.dst_row[t * kTopK + k], h);
          part += Widen(RowType::kBF16, reinterpret_cast<const uint8_t*>(&bits));
        }
        sum += Rounded(RowType::kBF16, part);
      }
      uint16_t want;
      Narrow(RowType::kBF16, sum, reinterpret_cast<uint8_t*>(&want));
      if (got[h] != want) return false;
    }
    return true;
  }

  World& world_;
  int n_;
  Case c_;
  std::vector<Ints> idx_;
  Routed routed_;
  std::vector<RankData> data_;
  double remote_rows_ = 0;
};

void TimeDispatch(Bench& bench) {
  const int grids[][4] = {{4, 4, 7, 2},   {8, 8, 7, 2},   {10, 10, 7, 2}, {12, 12, 7, 2},
                          {12, 20, 7, 2}, {16, 16, 7, 2}, {12, 28, 7, 2}, {16, 24, 7, 2},
                          {20, 20, 7, 2}, {24, 24, 7, 2}, {24, 40, 7, 2}, {32, 32, 7, 2},
                          {24, 24, 5, 3}};
  for (const auto& g : grids) {
    const ec::DispatchGrid grid{g[0], g[1], g[2], g[3]};
    const double us = bench.Time([&](int r) { bench.Dispatch(r, grid); });
    std::printf("dispatch push %2d place %2d (%d) warps %d buffers %d: %7.1f us %6.1f GB/s\n", g[0],
                g[1], g[0] + g[1], g[2], g[3], us, bench.RemoteBytes() / us / 1e3);
  }
}

void TimeCombine(Bench& bench) {
  const int grids[][2] = {{4, 4},   {8, 8},   {12, 12}, {16, 12}, {20, 12}, {20, 20},
                          {24, 16}, {28, 12}, {28, 20}, {32, 16}, {40, 24}, {32, 32}};
  for (const auto& g : grids) {
    const double us = bench.Time([&](int r) { bench.Combine(r, {g[0], g[1]}, false, false); });
    std::printf("combine reduce %2d sum %2d (%d): %7.1f us %6.1f GB/s\n", g[0], g[1], g[0] + g[1],
                us, bench.RemoteBytes() / us / 1e3);
  }
}

int TimeTokens(World& world, int tokens, bool sweep) {
  Bench bench(world, tokens);
  std::printf("== T=%d H=%d bf16 K=%d E=%d, %d ranks, %.1f MB remote per rank\n", tokens, kWidth,
              kTopK, kExperts, world.ranks(), bench.RemoteBytes() / 1e6);
  for (int blocks : {8, 16, 32, 48, 64}) {
    const double us = bench.Time([&](int r) { bench.Prepare(r, blocks); });
    std::printf("prepare %d blocks: %.1f us\n", blocks, us);
  }
  if (sweep) {
    for (int warps : {4, 15}) {
      for (int blocks : {8, 16, 20, 24, 32, 40, 48, 64, 132}) {
        const double us = bench.Time([&](int r) { bench.Ceiling(r, blocks, warps); });
        std::printf("ceiling %d blocks %d warps: %.1f us %.1f GB/s\n", blocks, warps, us,
                    bench.RemoteBytes() / us / 1e3);
      }
    }
    TimeDispatch(bench);
    TimeCombine(bench);
  }
  for (bool weighted : {false, true}) {
    for (bool exact : {false, true}) {
      const double us = bench.Time([&](int r) { bench.Combine(r, {}, weighted, exact); });
      std::printf("combine %s %s: %.1f us %.1f GB/s\n", weighted ? "weighted" : "plain",
                  exact ? "exact" : "fast", us, bench.RemoteBytes() / us / 1e3);
    }
  }
  const double bwd = bench.Time([&](int r) { bench.CombineBwd(r, {}); });
  std::printf("combine backward with d_weights: %.1f us\n", bwd);
  const double pair = bench.Time([&](int r) {
    bench.Dispatch(r, {});
    bench.Combine(r, {}, false, false);
  });
  std::printf("dispatch + combine pair: %.1f us\n", pair);
  std::fflush(stdout);
  return bench.Check();
}

// A short look for work on one kernel.
int TimeDefaults(World& world, int tokens) {
  Bench bench(world, tokens);
  bench.Time([&](int r) { bench.Prepare(r, 32); });
  const auto print = [&](const char* what, int a, int b, double us) {
    std::printf("%s %d+%d: %.1f us %.1f GB/s\n", what, a, b, us, bench.RemoteBytes() / us / 1e3);
  };
  for (int blocks : {20, 40, 48}) {
    print("ceiling", blocks, 0, bench.Time([&](int r) { bench.Ceiling(r, blocks, 15); }));
  }
  for (const auto& g :
       {std::pair<int, int>{10, 24}, {12, 20}, {12, 28}, {16, 24}, {16, 32}, {20, 20}, {24, 24}}) {
    const ec::DispatchGrid grid{g.first, g.second, 7, 2};
    print("dispatch", g.first, g.second, bench.Time([&](int r) { bench.Dispatch(r, grid); }));
  }
  for (const auto& g : {std::pair<int, int>{16, 12}, {20, 12}, {20, 20}, {24, 16}, {28, 20}}) {
    print("combine", g.first, g.second,
          bench.Time([&](int r) { bench.Combine(r, {g.first, g.second}, false, false); }));
  }
  return bench.Check();
}

}  // namespace

int TimeAll(int ranks, int gpus, bool quick) {
  const GroupSizes sizes{ranks, ranks, kExperts, kWidth, 8192, 1, kTopK, 2, 2};
  World world(sizes, gpus);
  if (quick) return TimeDefaults(world, 8192);
  return TimeTokens(world, 128, false) + TimeTokens(world, 4096, true) +
         TimeTokens(world, 8192, true);
}

}  // namespace gpu_test
