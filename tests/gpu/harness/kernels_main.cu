// Checks kernels against the reference, and waits that fail; times kernels next to the link's
// ceiling.
//
//   kernels_main check|small|time|few|warps [ranks]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "case_runner.h"
#include "timed_case.h"
#include "timing.h"

namespace gpu_test {
namespace {

// Delays a stream, so that ranks start in another order every time.
__global__ void Delay(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

std::vector<Case> Cases(int n) {
  using P = CombinePrecision;
  using T = RowType;
  return {
      {"bf16", n, 96, 256, 4, 8 * n, 16, 4096, T::kBF16, 0, true},
      {"bf16 exact, two passes", n, 97, 256, 4, 8 * n, 16, 4096, T::kBF16, 0, true, P::kExact},
      {"f16 unweighted", n, 64, 64, 6, 16 * n, 8, 4096, T::kF16, 0, false},
      {"f16 exact", n, 33, 8, 2, 4 * n, 1, 512, T::kF16, 1, true, P::kExact},
      {"bf16 exact, sums in f32", n, 97, 256, 4, 8 * n, 16, 4096, T::kBF16, 0, true, P::kExact,
       true},
      {"f16 exact, sums in f32", n, 33, 2048, 8, 4 * n, 1, 512, T::kF16, 1, true, P::kExact, true},
      {"bf16, 8-bit sums", n, 97, 2208, 4, 8 * n, 16, 4096, T::kBF16, 0, true, P::kFp8},
      {"f16, 8-bit sums, few values", n, 33, 8, 2, 4 * n, 1, 512, T::kF16, 1, true, P::kFp8},
      {"f32, 8-bit sums", n, 50, 1100, 3, 4 * n, 4, 1024, T::kF32, 1, false, P::kFp8},
      {"f32 odd width", n, 50, 100, 3, 4 * n, 4, 1024, T::kF32, 1, true},
      {"f32 wide rows", n, 40, 16384, 2, 4 * n, 8, 512, T::kF32, 0, true},
      {"bf16 wide rows", n, 40, 16384, 2, 4 * n, 8, 512, T::kBF16, 0, true, P::kExact},
      {"bytes", n, 200, 48, 8, 8 * n, 16, 8192, T::kBytes, 1, true},
      {"drops", n, 128, 128, 8, 8 * n, 16, 256, T::kBF16, 1, true},
      {"drops, skewed", n, 300, 64, 4, 32 * n, 4, 400, T::kF32, 4, true},
      {"drops, rows closer than that", n, 300, 64, 4, 32 * n, 8, 400, T::kF32, 4, true, P::kFast,
       false, 1},
      {"all to one expert", n, 100, 64, 4, 8 * n, 16, 2048, T::kBF16, 2, true},
      {"all to one expert, drops", n, 100, 64, 4, 8 * n, 16, 160, T::kBF16, 2, true},
      // With four ranks and more, rows are packed into lanes, and go in parts.
      {"all to one expert, two slots", n, 100, 64, 2, 8 * n, 16, 2048, T::kBF16, 2, true},
      {"skewed, two slots, exact", n, 255, 64, 2, 8 * n, 4, 2048, T::kF16, 4, true, P::kExact},
      {"skewed, two slots, 8-bit", n, 255, 64, 2, 8 * n, 4, 2048, T::kBF16, 4, true, P::kFp8},
      {"a rank without rows", n, 77, 64, 4, 8 * n, 16, 2048, T::kBF16, 3, true},
      {"no tokens", n, 0, 64, 4, 8 * n, 16, 128, T::kBF16, 0, true},
      {"one token", n, 1, 8, 1, n, 1, 16, T::kBF16, 0, true},
      {"K 32", n, 65, 32, 32, 64 * n, 2, 16384, T::kBF16, 0, true},
      {"K 32 repeats", n, 65, 32, 32, 8 * n, 2, 16384, T::kF16, 1, true, P::kExact},
      {"many experts", n, 500, 16, 8, 2048 / n * n, 8, 65536, T::kBF16, 0, false},
      {"tokens of several steps", n, 3000, 32, 2, 8 * n, 128, 16384, T::kBF16, 1, true},
      // With copies of experts: as many slots as experts, or few of them.
      {"copies, even", n, 300, 64, 4, 8 * n, 8, 1352, T::kBF16, 0, true, P::kFast, false, 1, 8,
       9600},
      {"copies, skewed", n, 300, 64, 4, 8 * n, 8, 1352, T::kBF16, 4, true, P::kFast, false, 0, 8,
       9600},
      {"copies, skewed, drops", n, 300, 64, 4, 8 * n, 8, 536, T::kF32, 4, true, P::kFast, false, 1,
       8, 400},
      {"copies, skewed, few slots", n, 300, 64, 4, 32 * n, 1, 9600, T::kBF16, 4, true, P::kExact,
       false, 0, 3, 9600},
      {"copies, all to one expert", n, 300, 64, 4, 8 * n, 8, 1352, T::kBF16, 2, true, P::kFast,
       false, 1, 8, 38400},
      {"copies, a rank without rows", n, 300, 64, 4, 4 * n, 1, 1240, T::kF16, 3, true, P::kFast,
       false, 0, 5, 9600},
  };
}

// Runs several epochs of two inputs in turn, with ranks delayed at random, without a sync in
// between.
int RunCase(const Case& c, int gpus, const Grids& grids, int rounds, uint64_t epoch = 0) {
  World world(SizesOf(c), gpus);
  CaseRunner first(world, c, 7, grids);
  CaseRunner second(world, c, 8, grids);
  std::mt19937 random(c.tokens);
  world.Synchronize();
  for (int i = 0; i < rounds; ++i) {
    if (i == 1 && epoch > 0) world.SetEpoch(epoch);  // with flags of the first epochs
    for (int r = 0; r < c.ranks; ++r) {
      world.Use(r);
      Delay<<<1, 1, 0, world.stream(r)>>>(random() % 100000);
      first.Enqueue(r);
      second.Enqueue(r);
    }
  }
  world.Synchronize();
  const int wrong = first.Compare() + second.Compare();
  for (int r = 0; r < c.ranks; ++r) {
    if (world.record(r).valid != 0) {
      std::printf("  %s: rank %d failed: reason %u op %u waiting for %d seen %x expected %x\n",
                  c.name, r, world.record(r).reason, world.record(r).op,
                  world.record(r).waiting_for, world.record(r).seen, world.record(r).expected);
    }
  }
  std::printf("%s %s\n", wrong == 0 ? "ok  " : "FAIL", c.name);
  std::fflush(stdout);
  return wrong;
}

// All rows go to rank 0, with many tokens a slab of more than 2^31 bytes. Other ranks get nothing
// and wait for no row, but must not run ahead of a late rank.
int RunOneSided(int n, int gpus, const Grids& grids, int tokens) {
  if (kExperts % n != 0) return 0;
  World world(GroupOf(n, kExperts, kWidth, tokens, 1, kTopK, 2), gpus);
  TimedCase timed(world, tokens, Routing::kOneRank);
  const auto repeat = [&](bool first_is_late, const auto& enqueue) {
    for (int r = 0; r < n; ++r) {
      world.Use(r);
      if ((r == 0) == first_is_late) Delay<<<1, 1, 0, world.stream(r)>>>(2'000'000);
      for (int i = 0; i < 6; ++i) enqueue(r);
    }
  };
  for (int r = 0; r < n; ++r) {
    world.Use(r);
    timed.Prepare(r, grids.prepare);
  }
  repeat(true, [&](int r) { timed.CombineBwd(r, grids.dispatch, true); });
  repeat(true, [&](int r) { timed.Dispatch(r, grids.dispatch); });
  repeat(false, [&](int r) { timed.Combine(r, grids.combine, false, CombinePrecision::kFast); });
  world.Synchronize();
  const int wrong = timed.Check();
  std::printf("%s all to one rank, %d tokens, late ranks\n", wrong == 0 ? "ok  " : "FAIL", tokens);
  std::fflush(stdout);
  return wrong;
}

// Captures the same program once on every rank, and replays it.
int RunGraphs(const Case& c, int gpus, const Grids& grids) {
  World world(SizesOf(c), gpus);
  CaseRunner runner(world, c, 9, grids);
  std::vector<cudaGraphExec_t> graphs(c.ranks);
  for (int r = 0; r < c.ranks; ++r) {
    world.Use(r);
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(world.stream(r), cudaStreamCaptureModeThreadLocal));
    runner.Enqueue(r);
    CHECK_CUDA(cudaStreamEndCapture(world.stream(r), &graph));
    CHECK_CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
    CHECK_CUDA(cudaGraphUpload(graphs[r], world.stream(r)));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  world.Synchronize();
  for (int i = 0; i < 20; ++i) {
    for (int r = 0; r < c.ranks; ++r) {
      world.Use(r);
      CHECK_CUDA(cudaGraphLaunch(graphs[r], world.stream(r)));
    }
  }
  world.Synchronize();
  int wrong = runner.Compare();
  world.Close();
  for (int r = 0; r < c.ranks; ++r) {
    world.Use(r);
    CHECK_CUDA(cudaGraphLaunch(graphs[r], world.stream(r)));
  }
  world.Synchronize();
  for (int r = 0; r < c.ranks; ++r) {
    wrong += world.record(r).reason != static_cast<uint32_t>(ec::FailReason::kClosed);
  }
  std::printf("%s graphs replayed, and after close\n", wrong == 0 ? "ok  " : "FAIL");
  return wrong;
}

bool AllNan(const Buffer& buffer) {
  for (uint16_t x : buffer->read<uint16_t>()) {
    if (x != 0x7FC0) return false;
  }
  return true;
}

// Counts wrong arrays in the next generation, in which all ranks run everything.
int RunNext(World& world, const Case& c, uint32_t seed, const Grids& grids) {
  world.Form(2, 20'000'000'000ull);
  CaseRunner again(world, c, seed, grids);
  for (int r = 0; r < c.ranks; ++r) again.Enqueue(r);
  world.Synchronize();
  return again.Compare();
}

// The last rank stays away (or comes with another handle). The others must end in time with the
// reason, and with NaN in floats and 0 in integers.
int RunFailure(int n, int gpus, const Grids& grids, ec::FailReason reason) {
  const Case c{"failure", n, 96, 256, 4, 8 * n, 16, 1024, RowType::kBF16, 0, true};
  const bool poison = reason == ec::FailReason::kPoisoned;
  World world(SizesOf(c), gpus, poison ? 60'000'000'000ull : 50'000'000ull);
  CaseRunner runner(world, c, 3, grids);
  const auto started = std::chrono::steady_clock::now();
  for (int r = 0; r < n - 1; ++r) runner.Enqueue(r);
  if (reason == ec::FailReason::kMismatch) {
    world.Use(n - 1);
    const ec::CallSizes sizes{c.tokens, c.top_k, c.capacity, c.experts / n, c.width};
    const RankData& d = runner.data(n - 1);
    CHECK_CUDA(
        ec::LaunchPrepare(world.stream(n - 1), {world.group(n - 1),
                                                {0x1234, nullptr, 1},
                                                sizes,
                                                c.experts,
                                                c.alignment,
                                                c.row_alignment(),
                                                d.idx->as<int32_t>(),
                                                d.plan->buffers<int32_t>(),
                                                nullptr,
                                                grids.prepare,
                                                ep_runtime::LaneLayout(world.sizes()).room}));
  }
  if (poison) {
    usleep(20'000);
    *world.poison() = 1;
  }
  world.Synchronize();
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - started).count();
  int wrong = 0;
  for (int r = 0; r < n - 1; ++r) {
    world.Use(r);
    const auto& record = world.record(r);
    const RankData& d = runner.data(r);
    if (record.valid != 1 || record.reason != static_cast<uint32_t>(reason)) {
      std::printf("  rank %d: valid %u reason %u\n", r, record.valid, record.reason);
      ++wrong;
    }
    if (!AllNan(d.recv) || !AllNan(d.out) || !AllNan(d.d_tokens) || !AllNan(d.d_expert_out)) {
      std::printf("  rank %d: outputs are not all NaN\n", r);
      ++wrong;
    }
    for (int32_t x : d.plan->staged_row->read<int32_t>()) wrong += x != 0;
  }
  // Context and next generation must work.
  *world.poison() = 0;
  wrong += RunNext(world, c, 4, grids);
  std::printf("%s failing wait, reason %u, left after %.1f ms; next generation works\n",
              wrong == 0 ? "ok  " : "FAIL", static_cast<unsigned>(reason), ms);
  std::fflush(stdout);
  return wrong;
}

// The last rank stays away from combine. Sending warps and summing warps of the others must end.
int RunCombineFailure(int n, int gpus, const Grids& grids) {
  const Case c{"failure", n, 500, 256, 4, 8 * n, 16, 4096, RowType::kBF16, 0, true};
  World world(SizesOf(c), gpus, 50'000'000ull);
  CaseRunner runner(world, c, 5, grids);
  for (int r = 0; r < n; ++r) runner.Enqueue(r, r < n - 1);
  world.Synchronize();
  int wrong = 0;
  for (int r = 0; r < n - 1; ++r) {
    world.Use(r);
    const auto& record = world.record(r);
    const bool timeout = record.reason == static_cast<uint32_t>(ec::FailReason::kTimeout) &&
                         record.op == static_cast<uint32_t>(ep_runtime::OpCode::kCombine);
    if (!timeout) std::printf("  rank %d: reason %u op %u\n", r, record.reason, record.op);
    wrong += !timeout || !AllNan(runner.data(r).out) || !AllNan(runner.data(r).d_tokens);
  }
  wrong += RunNext(world, c, 6, grids);
  std::printf("%s a rank stays away from combine; next generation works\n",
              wrong == 0 ? "ok  " : "FAIL");
  std::fflush(stdout);
  return wrong;
}

// A peer may write anything into a window. A whole round fills rank 0's window. Then rank 0 runs
// all ops again, alone, with one word of the window changed: every `step`-th word in turn. Each
// call must end, within its budget if a flag is gone, and write only into its own arrays.
int RunFuzz(int n, int gpus, const Grids& grids, int step, uint64_t budget_ns, int spare) {
  Case c{"one word of a window", n, 8, 16, 2, 4 * n, 4, 64, RowType::kBF16, 1, true};
  c.spare = spare;
  c.given_most_kept = c.capacity;
  GroupSizes sizes = SizesOf(c);
  sizes.lanes = 8;  // more lanes than ops, so that every op's words stay
  World world(sizes, gpus, budget_ns);
  CaseRunner runner(world, c, 11, grids);
  world.Use(0);
  const size_t bytes = FlagLayout(sizes).window_bytes;
  const cudaStream_t stream = world.stream(0);
  Memory window(bytes), group(sizeof(DeviceGroup));
  const auto copy = [&](void* to, const void* from, size_t size) {
    CHECK_CUDA(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream));
  };
  copy(group.as<void>(), world.group(0), group.bytes());
  world.Form(1, 20'000'000'000ull);  // long, because ranks of a GPU may start one after another
  for (int r = 0; r < n; ++r) runner.Enqueue(r);
  world.Synchronize();
  int wrong = runner.Compare();
  world.Use(0);
  copy(window.as<void>(), world.window(0), bytes);
  const auto run_alone = [&](size_t at, int byte, size_t count) {
    copy(world.window(0), window.as<void>(), bytes);
    CHECK_CUDA(cudaMemsetAsync(world.window(0) + at, byte, count, stream));
    copy(world.group(0), group.as<void>(), group.bytes());
    runner.Enqueue(0);
  };
  run_alone(0, 0, 0);  // with the window unchanged, everything runs
  world.Synchronize();
  wrong += runner.Compare() + (world.record(0).valid != 0);
  const auto started = std::chrono::steady_clock::now();
  int64_t words = 0;
  for (size_t at = 0; at + 4 <= bytes; at += 4 * size_t{static_cast<unsigned>(step)}) {
    for (int byte : {0xFF, 0x7F, 0x01}) {
      run_alone(at, byte, 4);
      const cudaError_t error = cudaStreamSynchronize(stream);
      ++words;
      if (error == cudaSuccess) continue;
      std::printf("  word at byte %zu set to %02x: %s\n", at, byte, cudaGetErrorString(error));
      std::exit(1);  // nothing on this device works after that
    }
  }
  const double s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  wrong += runner.CountOverruns(0);
  // With the window restored, everything works again.
  wrong += RunNext(world, c, 12, grids);
  std::printf("%s %lld rounds with one word of %zu bytes of a window wrong, %d slots, %.1f s\n",
              wrong == 0 ? "ok  " : "FAIL", static_cast<long long>(words), bytes, spare, s);
  std::fflush(stdout);
  return wrong;
}

// Times how long a failed call takes to fill a slab of some GB with NaN: the first one, whose last
// block does it alone, and a later one.
int TimeFill(int n, int gpus, const Grids& grids) {
  const int tokens = 16384;
  World world(GroupOf(n, kExperts, kWidth, tokens, 1, kTopK, 2), gpus, 1'000'000ull);
  TimedCase timed(world, tokens, Routing::kOneRank);
  world.Use(0);
  const auto took = [&] {
    const auto started = std::chrono::steady_clock::now();
    timed.Dispatch(0, grids.dispatch);
    world.Synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - started)
        .count();
  };
  const double first = took(), second = took();
  std::printf("a failed dispatch fills its slab in %.1f ms, the next one in %.1f ms\n", first,
              second);
  return 0;
}

}  // namespace

int Main(const std::string& what, int ranks, int gpus) {
  Grids grids;
  if (gpus < ranks) grids = {3, {3, 3, 7}, {3, 3}};
  if (16 * gpus < ranks) grids = {3, {2, 2, 7}, {2, 2}};  // 32 ranks' blocks have an SM each
  int wrong = 0;
  if (what == "check" || what == "small") {
    for (const Case& c : Cases(ranks)) wrong += RunCase(c, gpus, grids, what == "small" ? 1 : 3);
    // Tags of calls have 24 bits of the epoch.
    for (int i : {0, 1}) wrong += RunCase(Cases(ranks)[i], gpus, grids, 3, (1 << 24) - 3);
    wrong += RunGraphs(Cases(ranks)[0], gpus, grids);
    // A sanitizer makes kernels a hundred times slower.
    for (int spare : {0, 4}) {
      if (ranks == 1) continue;
      wrong += what == "small" ? RunFuzz(ranks, gpus, grids, 97, 5'000'000, spare)
                               : RunFuzz(ranks, gpus, grids, 1, 200'000, spare);
    }
    wrong += RunOneSided(ranks, gpus, grids, what == "small" ? 16 : 65536 / std::max(ranks, 8));
  }
  if (what == "check" && ranks > 1) {
    for (auto reason :
         {ec::FailReason::kTimeout, ec::FailReason::kPoisoned, ec::FailReason::kMismatch}) {
      wrong += RunFailure(ranks, gpus, grids, reason);
    }
    wrong += RunCombineFailure(ranks, gpus, grids);
  }
  if (what == "time" && ranks > 1) wrong += TimeFill(ranks, gpus, grids);
  if (what == "time" || what == "few" || what == "warps") wrong += TimeAll(ranks, gpus, what);
  std::printf("%s: %d arrays wrong, %d ranks on %d GPUs\n", wrong == 0 ? "passed" : "FAILED", wrong,
              ranks, gpus);
  return wrong == 0 ? 0 : 1;
}

}  // namespace gpu_test

int main(int argc, char** argv) { return gpu_test::Run(gpu_test::Main, argc, argv); }
