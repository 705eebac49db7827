// Inputs of all ranks at the timed sizes, every op on them, and checks of results.
#ifndef EP_RUNTIME_TESTS_GPU_TIMED_CASE_H_
#define EP_RUNTIME_TESTS_GPU_TIMED_CASE_H_

#include <algorithm>
#include <cmath>
#include <functional>

#include "case_runner.h"
#include "cuda/movement/bench/bench_kernels.h"
#include "energy.h"

namespace gpu_test {

constexpr int kWidth = 7168;  // the default
constexpr int kTopK = 8;
constexpr int kExperts = 256;
constexpr int kIterations = 10;
constexpr int kRepeats = 11;

enum class Routing { kUniform, kZipf, kOneRank };

// Element of any array, for both sides: bf16 of magnitude 1 to 2, either sign.
__host__ __device__ inline uint16_t ValueAt(uint32_t what, uint32_t row, uint32_t column) {
  uint32_t x = what * 0x9E3779B1u ^ row * 0x85EBCA77u ^ column * 0xC2B2AE3Du;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 13;
  return static_cast<uint16_t>(0x3F80u | (x & 0x807Fu));
}

static __global__ void FillValues(uint16_t* out, uint32_t what, int64_t rows, int width) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int h = threadIdx.x; h < width; h += blockDim.x) {
      out[row * width + h] = ValueAt(what, static_cast<uint32_t>(row), h);
    }
  }
}

enum : uint32_t { kTokens = 100, kExpertOut = 200 };

class TimedCase {
 public:
  TimedCase(World& world, int tokens, Routing routing, int width = kWidth, int alignment = 128,
            int row_alignment = 128)
      : world_(world), n_(world.ranks()), width_(width), routing_(routing), data_(world.ranks()) {
    const int local = kExperts / n_;
    const int64_t rows = int64_t{n_} * tokens * std::min(kTopK, local);
    const auto capacity =
        static_cast<int>(ep_runtime::AlignUp(rows + (alignment - 1) * local, 128));
    c_ = {"bench",   n_,       tokens,         width_, kTopK, kExperts,
          alignment, capacity, RowType::kBF16, 0,      false};
    c_.given_row_alignment = row_alignment;
    std::mt19937 random(tokens);
    double sum = 0;
    for (int e = 0; e < kExperts; ++e) {
      sum += routing == Routing::kZipf ? 1.0 / (e + 1) : 1.0;
      popularity_.push_back(sum);
    }
    for (int r = 0; r < n_; ++r) idx_.push_back(RandomExperts(random));
    routed_ = Route(c_, idx_);
    for (int r = 0; r < n_; ++r) Fill(r);
    world_.Synchronize();
  }

  ep_runtime::LaneRoom Room() const { return ep_runtime::LaneLayout(world_.sizes()).room; }
  ec::CallSizes Sizes() const { return {c_.tokens, kTopK, c_.capacity, kExperts / n_, width_}; }
  // For one rank, on average: each token once to every rank that needs it, and once per expert.
  double RemoteBytes() const { return remote_rows_ * width_ * 2.0 / n_; }
  double CopiedBytes() const { return copied_rows_ * width_ * 2.0 / n_; }
  int tokens() const { return c_.tokens; }
  int width() const { return width_; }

  // With `spread`, a rank has as many slots for copies as experts, and the plan is in its own
  // arrays.
  void Prepare(int r, int blocks, bool spread = false) {
    RankData& d = data_[r];
    ec::PrepareParams params{};
    params.group = world_.group(r);
    params.name = {1, nullptr, 0};
    params.sizes = Sizes();
    params.num_experts = kExperts;
    params.alignment = c_.alignment;
    params.row_alignment = c_.row_alignment();
    params.topk_idx = d.idx->as<int32_t>();
    params.plan = (spread ? spread_[r] : d.plan)->buffers<int32_t>();
    params.blocks = blocks;
    params.room = Room();
    if (spread) params.spread = {c_.local(), c_.capacity, d.slots->as<int32_t>()};
    CHECK_CUDA(ec::LaunchPrepare(world_.stream(r), params));
  }
  void Dispatch(int r, const ec::DispatchGrid& grid) {
    RankData& d = data_[r];
    CHECK_CUDA(ec::LaunchDispatch(world_.stream(r), {world_.group(r),
                                                     {1, nullptr, 0},
                                                     Sizes(),
                                                     RowType::kBF16,
                                                     width_ * 2,
                                                     d.tokens->as<void>(),
                                                     d.topk_weights->as<float>(),
                                                     d.plan->buffers<const int32_t>(),
                                                     d.recv->as<void>(),
                                                     d.recv_weights->as<float>(),
                                                     grid,
                                                     Room()}));
  }
  // Dispatches 8-bit rows, which end with scales of 128 values each.
  void DispatchNarrow(int r, const ec::DispatchGrid& grid) {
    RankData& d = data_[r];
    ec::DispatchParams params{};
    params.group = world_.group(r);
    params.name = {1, nullptr, 0};
    params.sizes = Sizes();
    params.type = RowType::kBytes;
    params.scale_bytes = width_ / 128 * 4;
    params.row_bytes = width_ + params.scale_bytes;
    params.tokens = d.tokens->as<void>();
    params.weights = d.topk_weights->as<float>();
    params.plan = d.plan->buffers<const int32_t>();
    params.recv = d.recv->as<void>();
    params.recv_scale = d.recv->as<uint8_t>() + int64_t{c_.capacity} * width_;
    params.recv_weights = d.recv_weights->as<float>();
    params.grid = grid;
    params.room = Room();
    CHECK_CUDA(ec::LaunchDispatch(world_.stream(r), params));
  }
  void DispatchBwd(int r, const ec::CombineGrid& grid) {
    RankData& d = data_[r];
    ec::CombineParams params = CombineOf(r, grid, false, CombinePrecision::kFast);
    params.op = ep_runtime::OpCode::kDispatchBwd;
    params.d_weights = d.recv_weights->as<float>();
    params.d_topk_weights = d.d_tokens->as<float>();
    CHECK_CUDA(ec::LaunchCombine(world_.stream(r), params));
  }
  // Combines the last dispatch's result in place.
  void CombineReceived(int r, const ec::CombineGrid& grid) {
    ec::CombineParams params = CombineOf(r, grid, false, CombinePrecision::kFast);
    params.rows = data_[r].recv->as<void>();
    CHECK_CUDA(ec::LaunchCombine(world_.stream(r), params));
  }
  void Combine(int r, const ec::CombineGrid& grid, bool weighted, CombinePrecision precision) {
    CHECK_CUDA(ec::LaunchCombine(world_.stream(r), CombineOf(r, grid, weighted, precision)));
  }
  ec::CombineParams CombineOf(int r, const ec::CombineGrid& grid, bool weighted,
                              CombinePrecision precision) {
    RankData& d = data_[r];
    return {world_.group(r),
            {1, nullptr, 0},
            ep_runtime::OpCode::kCombine,
            Sizes(),
            RowType::kBF16,
            width_ * 2,
            precision,
            Room(),
            d.expert_out->as<void>(),
            weighted ? d.recv_weights->as<float>() : nullptr,
            nullptr,
            d.plan->buffers<const int32_t>(),
            d.out->as<void>(),
            nullptr,
            grid};
  }
  void CombineBwd(int r, const ec::DispatchGrid& grid, bool weighted) {
    RankData& d = data_[r];
    CHECK_CUDA(
        ec::LaunchCombineBwd(world_.stream(r), {world_.group(r),
                                                {1, nullptr, 0},
                                                Sizes(),
                                                RowType::kBF16,
                                                width_ * 2,
                                                d.tokens->as<void>(),
                                                weighted ? d.expert_out->as<void>() : nullptr,
                                                weighted ? d.recv_weights->as<float>() : nullptr,
                                                d.plan->buffers<const int32_t>(),
                                                d.recv->as<void>(),
                                                weighted ? d.d_weights->as<float>() : nullptr,
                                                grid}));
  }
  // With `copies`, every slot's row travels, instead of one row per rank.
  void Ceiling(int r, int blocks, int warps, bool copies = false) {
    RankData& d = data_[r];
    const Buffer& rank = copies ? d.plan->dst_rank : d.d_topk;
    const Buffer& row = copies ? d.row_weights : d.verdict;
    CHECK_CUDA(ec::LaunchCeiling(
        world_.stream(r),
        {world_.group(r), d.tokens->as<void>(), rank->as<int32_t>(), row->as<int32_t>(), c_.tokens,
         kTopK, width_ * 2, blocks, warps, d.d_weights->as<int32_t>()}));
  }

  // Median us of an iteration, with the slowest rank each time, from replayed captures. `mj` gets
  // the mJ of an iteration on all GPUs together, 0 without counters.
  double Time(const std::function<void(int)>& enqueue, double* mj = nullptr) {
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
      // A graph runs before the timed one, so that the time has no host launches.
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
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    if (mj != nullptr) *mj = CountMillijoules(graphs, us);
    for (int r = 0; r < n_; ++r) {
      world_.Use(r);
      cudaGraphExecDestroy(graphs[r]);
      cudaEventDestroy(before[r]);
      cudaEventDestroy(after[r]);
    }
    return us;
  }

  // Checks whole plans, and a sample of rows.
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
    for (int r = 0; r < n_; ++r) {
      const auto& record = world_.record(r);
      if (record.valid == 0) continue;
      ++wrong;
      std::printf("  rank %d failed: reason %u op %u waiting for %d seen %x expected %x\n", r,
                  record.reason, record.op, record.waiting_for, record.seen, record.expected);
    }
    return wrong;
  }

 private:
  // The counter is updated some ten times a second.
  double CountMillijoules(const std::vector<cudaGraphExec_t>& graphs, double us) {
    const int launches = std::max(1, static_cast<int>(300e3 / (us * kIterations)));
    const double before = DrawnMillijoules(world_.gpus());
    for (int i = 0; i < launches; ++i) {
      for (int r = 0; r < n_; ++r) {
        world_.Use(r);
        CHECK_CUDA(cudaGraphLaunch(graphs[r], world_.stream(r)));
      }
    }
    world_.Synchronize();
    return (DrawnMillijoules(world_.gpus()) - before) / (launches * kIterations);
  }
  int RandomExpert(std::mt19937& random) const {
    if (routing_ == Routing::kOneRank) return static_cast<int>(random() % kTopK);
    const double at = std::uniform_real_distribution<double>(0, popularity_.back())(random);
    const auto e = std::upper_bound(popularity_.begin(), popularity_.end() - 1, at);
    // Spread popular experts, so that none are neighbours.
    return static_cast<int>(e - popularity_.begin()) * 37 % kExperts;
  }
  Ints RandomExperts(std::mt19937& random) {
    Ints idx(c_.tokens * kTopK);
    for (int t = 0; t < c_.tokens; ++t) {
      int32_t* at = &idx[t * kTopK];
      for (int k = 0; k < kTopK; ++k) {
        do {
          at[k] = RandomExpert(random);
        } while (std::find(at, at + k, at[k]) != at + k);
      }
    }
    return idx;
  }

  void Fill(int r) {
    world_.Use(r);
    RankData& d = data_[r];
    const int64_t row_bytes = width_ * 2;
    d.idx = std::make_unique<Memory>(idx_[r]);
    d.tokens = std::make_unique<Memory>(c_.tokens * row_bytes);
    d.out = std::make_unique<Memory>(c_.tokens * row_bytes);
    d.recv = std::make_unique<Memory>(c_.capacity * row_bytes);
    d.expert_out = std::make_unique<Memory>(c_.capacity * row_bytes);
    d.recv_weights = std::make_unique<Memory>(c_.capacity * 4);
    d.d_weights = std::make_unique<Memory>(c_.capacity * 4);
    d.topk_weights = std::make_unique<Memory>(Floats(c_.tokens * kTopK, 0.5f));
    d.plan = std::make_unique<Plan>(c_);
    Case spread = c_;
    spread.spare = spread.local();
    spread_.push_back(std::make_unique<Plan>(spread));
    d.slots = std::make_unique<Memory>(kExperts * 4);
    FillValues<<<1024, 256>>>(d.tokens->as<uint16_t>(), kTokens + r, c_.tokens, width_);
    FillValues<<<1024, 256>>>(d.expert_out->as<uint16_t>(), kExpertOut + r, c_.capacity, width_);
    CHECK_CUDA(cudaGetLastError());
    // The ceiling's destinations: each token once per rank.
    Ints rank(c_.tokens * kTopK, -1), row(c_.tokens * kTopK, -1), next(n_, 0);
    Ints copy(c_.tokens * kTopK, -1), copies(n_, 0);
    for (int t = 0; t < c_.tokens; ++t) {
      uint32_t seen = 0;
      for (int k = 0; k < kTopK; ++k) {
        const int to = routed_.plans[r].dst_rank[t * kTopK + k];
        if (to < 0) continue;
        copy[t * kTopK + k] = copies[to]++ % c_.tokens;
        copied_rows_ += to != r;
        if ((seen >> to & 1) != 0) continue;
        seen |= 1u << to;
        rank[t * kTopK + k] = to;
        row[t * kTopK + k] = next[to]++;
        remote_rows_ += to != r;
      }
    }
    d.d_topk = std::make_unique<Memory>(rank);
    d.verdict = std::make_unique<Memory>(row);
    d.row_weights = std::make_unique<Memory>(copy);
    d.d_tokens = std::make_unique<Memory>(int64_t{c_.tokens} * kTopK * 4);
  }

  std::vector<uint16_t> ReadRow(const Buffer& buffer, int64_t row) {
    std::vector<uint16_t> out(width_);
    CHECK_CUDA(cudaMemcpy(out.data(), buffer->as<uint16_t>() + row * width_, width_ * 2,
                          cudaMemcpyDeviceToHost));
    return out;
  }
  bool GoodRow(int r, int row) {
    const Row& from = routed_.rows[r][row];
    const auto got = ReadRow(data_[r].recv, row);
    for (int h = 0; h < width_; ++h) {
      const uint16_t want = from.source < 0 ? 0 : ValueAt(kTokens + from.source, from.token, h);
      if (got[h] != want) return false;
    }
    return true;
  }
  bool GoodToken(int r, int t) {
    const auto got = ReadRow(data_[r].out, t);
    const RankPlan& plan = routed_.plans[r];
    for (int h = 0; h < width_; ++h) {
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
  int width_;
  Routing routing_;
  Case c_;
  std::vector<Ints> idx_;
  Routed routed_;
  std::vector<RankData> data_;
  std::vector<std::unique_ptr<Plan>> spread_;  // of each rank
  double remote_rows_ = 0;
  double copied_rows_ = 0;
  std::vector<double> popularity_;
};

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_TIMED_CASE_H_
