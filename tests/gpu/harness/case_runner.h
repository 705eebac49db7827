// Runs every op of one case on all ranks, without a host sync between them, and compares with the
// reference bit by bit.
#ifndef EP_RUNTIME_TESTS_GPU_CASE_RUNNER_H_
#define EP_RUNTIME_TESTS_GPU_CASE_RUNNER_H_

#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/movement/prepare/prepare_kernels.h"
#include "device_world.h"
#include "memory.h"
#include "reference.h"

namespace gpu_test {

namespace ec = ep_runtime::cuda;

struct Grids {
  int prepare = 4;
  ec::DispatchGrid dispatch{4, 4, 7};
  ec::CombineGrid combine{4, 4};
};

// Memory of one rank.
using Buffer = std::unique_ptr<Memory>;

struct Plan {
  Buffer dst_rank, dst_row, recv_count, staged_start, staged_row, staged_slot, kept, group_sizes,
      num_recv;

  explicit Plan(const Case& c) {
    const auto ints = [](int64_t n) { return std::make_unique<Memory>(n * 4); };
    dst_rank = ints(c.tokens * c.top_k);
    dst_row = ints(c.tokens * c.top_k);
    recv_count = ints(c.ranks * CountColumns(c));
    staged_start = ints(c.ranks * c.tokens + 1);
    staged_row = ints(c.capacity);
    staged_slot = ints(c.capacity);
    kept = ints(c.physical());
    group_sizes = ints(c.physical());
    num_recv = ints(1);
  }
  template <typename Int>
  ep_runtime::PlanArrays<Int> buffers() const {
    return {dst_rank->as<Int>(),     dst_row->as<Int>(),     recv_count->as<Int>(),
            staged_start->as<Int>(), staged_row->as<Int>(),  staged_slot->as<Int>(),
            kept->as<Int>(),         group_sizes->as<Int>(), num_recv->as<Int>()};
  }
};

struct RankData {
  Buffer idx, tokens, topk_weights, expert_out, row_weights, grad;
  std::unique_ptr<Plan> plan;
  Buffer recv, recv_weights, out, d_tokens, d_topk, d_expert_out, d_weights, verdict, most, slots;
};

class CaseRunner {
 public:
  CaseRunner(World& world, const Case& c, uint32_t seed, Grids grids)
      : world_(world), c_(c), grids_(grids), random_(seed) {
    MakeInputs();
    routed_ = Route(c_, idx_);
    for (int r = 0; r < c_.ranks; ++r) Upload(r);
  }

  // Enqueues all ops on one rank's stream, or, without `whole`, prepare and dispatch only.
  void Enqueue(int rank, bool whole = true) {
    world_.Use(rank);
    RankData& d = data_[rank];
    const cudaStream_t stream = world_.stream(rank);
    ec::CallSizes sizes{c_.tokens, c_.top_k, c_.capacity, c_.local(), c_.width};
    const int row_bytes = c_.width * ElementBytes(c_.type);
    ec::DeviceGroup* group = world_.group(rank);
    const ec::CallName name{0x1234, nullptr, 0};
    const ep_runtime::LaneRoom room = ep_runtime::LaneLayout(world_.sizes()).room;
    CHECK_CUDA(ec::LaunchPrepare(stream, {group,
                                          name,
                                          sizes,
                                          c_.experts,
                                          c_.alignment,
                                          c_.row_alignment(),
                                          d.idx->as<int32_t>(),
                                          d.plan->buffers<int32_t>(),
                                          d.verdict->as<ec::DeviceVerdict>(),
                                          grids_.prepare,
                                          room,
                                          d.most->as<int32_t>(),
                                          {c_.spare, c_.most_kept(), d.slots->as<int32_t>()}}));
    sizes.experts = c_.physical();
    const auto plan = d.plan->buffers<const int32_t>();
    CHECK_CUDA(ec::LaunchDispatch(
        stream, {group, name, sizes, c_.type, row_bytes, d.tokens->as<void>(),
                 c_.weighted ? d.topk_weights->as<float>() : nullptr, plan, d.recv->as<void>(),
                 d.recv_weights->as<float>(), grids_.dispatch, room}));
    if (c_.type == RowType::kBytes || !whole) return;
    ec::CombineParams combine{group,
                              name,
                              ep_runtime::OpCode::kCombine,
                              sizes,
                              c_.type,
                              row_bytes,
                              c_.precision,
                              room,
                              d.expert_out->as<void>(),
                              c_.weighted ? d.row_weights->as<float>() : nullptr,
                              nullptr,
                              plan,
                              d.out->as<void>(),
                              nullptr,
                              grids_.combine,
                              c_.wide};
    CHECK_CUDA(ec::LaunchCombine(stream, combine));
    combine.op = ep_runtime::OpCode::kDispatchBwd;
    combine.weights = nullptr;
    combine.d_weights = d.row_weights->as<float>();
    combine.tokens = d.d_tokens->as<void>();
    combine.d_topk_weights = d.d_topk->as<float>();
    CHECK_CUDA(ec::LaunchCombine(stream, combine));
    CHECK_CUDA(ec::LaunchCombineBwd(
        stream,
        {group, name, sizes, c_.type, row_bytes, d.grad->as<void>(),
         c_.weighted ? d.expert_out->as<void>() : nullptr,
         c_.weighted ? d.row_weights->as<float>() : nullptr, plan, d.d_expert_out->as<void>(),
         c_.weighted ? d.d_weights->as<float>() : nullptr, grids_.dispatch, room}));
  }

  // Number of arrays that differ, each named on stdout.
  int Compare() {
    int wrong = 0;
    for (int r = 0; r < c_.ranks; ++r) {
      world_.Use(r);
      wrong += ComparePlan(r) + CompareDispatch(r);
      if (c_.type != RowType::kBytes) wrong += CompareCombine(r) + CompareCombineBwd(r);
    }
    return wrong;
  }

  const RankData& data(int rank) const { return data_[rank]; }
  // Counts arrays of a rank that were written past their end.
  int CountOverruns(int rank) const {
    world_.Use(rank);
    const RankData& d = data_[rank];
    const Plan& p = *d.plan;
    int overrun = 0;
    for (const Buffer* each :
         {&d.recv, &d.recv_weights, &d.out, &d.d_tokens, &d.d_topk, &d.d_expert_out, &d.d_weights,
          &d.verdict, &d.most, &d.slots, &p.dst_rank, &p.dst_row, &p.recv_count, &p.staged_start,
          &p.staged_row, &p.staged_slot, &p.kept, &p.group_sizes, &p.num_recv}) {
      overrun += !(*each)->intact();
    }
    return overrun;
  }
  const Case& spec() const { return c_; }

 private:
  int RowBytes() const { return c_.width * ElementBytes(c_.type); }

  Bytes RandomRows(int64_t rows) {
    Bytes out(rows * RowBytes());
    std::normal_distribution<float> normal;
    if (c_.type == RowType::kBytes) {
      for (auto& byte : out) byte = static_cast<uint8_t>(random_());
    } else {
      for (int64_t i = 0; i < rows * c_.width; ++i) {
        Narrow(c_.type, normal(random_), &out[i * ElementBytes(c_.type)]);
      }
    }
    return out;
  }
  Floats RandomFloats(int64_t n) {
    Floats out(n);
    for (auto& x : out) x = std::uniform_real_distribution<float>(0, 1)(random_);
    return out;
  }

  int RandomExpert(int rank) {
    const int any = static_cast<int>(random_() % c_.experts);
    if (c_.routing == 2) return 0;
    if (c_.routing == 3 && rank == 1) return -1;
    if (c_.routing == 4) return any * (static_cast<int>(random_() % c_.experts)) / c_.experts;
    if (c_.routing == 1 && random_() % 5 == 0) return -1 - static_cast<int>(random_() % 2) * 1000;
    return any;
  }
  void MakeInputs() {
    for (int r = 0; r < c_.ranks; ++r) {
      Ints idx(c_.tokens * c_.top_k);
      for (int t = 0; t < c_.tokens; ++t) {
        for (int k = 0; k < c_.top_k; ++k) {
          int32_t* at = &idx[t * c_.top_k];
          do {
            at[k] = RandomExpert(r);
          } while (c_.routing == 0 && std::find(at, at + k, at[k]) != at + k);
        }
      }
      idx_.push_back(idx);
      tokens_.push_back(RandomRows(c_.tokens));
      grad_.push_back(RandomRows(c_.tokens));
      topk_weights_.push_back(RandomFloats(int64_t{c_.tokens} * c_.top_k));
    }
    data_.resize(c_.ranks);
  }

  // Rows that no op may read are NaN.
  void Upload(int r) {
    Bytes rows = RandomRows(c_.capacity);
    Floats weights = RandomFloats(c_.capacity);
    for (int row = 0; row < c_.capacity; ++row) {
      if (routed_.rows[r][row].source >= 0) continue;
      std::fill_n(&rows[int64_t{row} * RowBytes()], RowBytes(), 0xFF);
      std::memset(&weights[row], 0xFF, 4);
    }
    expert_out_.push_back(rows);
    row_weights_.push_back(weights);
    world_.Use(r);
    RankData& d = data_[r];
    d.idx = std::make_unique<Memory>(idx_[r]);
    d.tokens = std::make_unique<Memory>(tokens_[r]);
    d.topk_weights = std::make_unique<Memory>(topk_weights_[r]);
    d.expert_out = std::make_unique<Memory>(rows);
    d.row_weights = std::make_unique<Memory>(weights);
    d.grad = std::make_unique<Memory>(grad_[r]);
    d.plan = std::make_unique<Plan>(c_);
    const int64_t slab = int64_t{c_.capacity} * RowBytes();
    const int64_t tokens = int64_t{c_.tokens} * c_.width * ElementBytes(SumType(c_));
    for (Buffer* b : {&d.recv, &d.d_expert_out}) *b = std::make_unique<Memory>(slab);
    for (Buffer* b : {&d.out, &d.d_tokens}) *b = std::make_unique<Memory>(tokens);
    for (Buffer* b : {&d.recv_weights, &d.d_weights}) {
      *b = std::make_unique<Memory>(c_.capacity * 4);
    }
    d.d_topk = std::make_unique<Memory>(int64_t{c_.tokens} * c_.top_k * 4);
    d.verdict = std::make_unique<Memory>(sizeof(ec::DeviceVerdict));
    d.most = std::make_unique<Memory>(4);
    d.slots = std::make_unique<Memory>(int64_t{c_.ranks} * c_.spare * 4);
  }

  template <typename T>
  int Same(const char* what, int rank, const Buffer& got, const std::vector<T>& want) {
    const std::vector<T> seen = got->read<T>();
    if (want.empty() || std::memcmp(seen.data(), want.data(), want.size() * sizeof(T)) == 0) {
      return 0;
    }
    size_t at = 0;
    while (std::memcmp(&seen[at], &want[at], sizeof(T)) == 0) ++at;
    std::printf("  %s: %s of rank %d differs at %zu of %zu: %g, want %g\n", c_.name, what, rank, at,
                want.size(), static_cast<double>(seen[at]), static_cast<double>(want[at]));
    return 1;
  }

  int ComparePlan(int r) {
    const RankPlan& want = routed_.plans[r];
    const Plan& got = *data_[r].plan;
    int lowest = -1;
    for (int i = c_.ranks - 1; i >= 0; --i) {
      if (routed_.plans[i].num_recv[0] > c_.most_kept()) lowest = i;
    }
    const Ints verdict{lowest, lowest < 0 ? 0 : routed_.plans[lowest].num_recv[0], c_.most_kept()};
    const Ints most{*std::max_element(routed_.zones.begin(), routed_.zones.end())};
    return Same("dst_rank", r, got.dst_rank, want.dst_rank) +
           Same("dst_row", r, got.dst_row, want.dst_row) +
           Same("recv_count", r, got.recv_count, want.recv_count) +
           Same("staged_start", r, got.staged_start, want.staged_start) +
           Same("staged_row", r, got.staged_row, want.staged_row) +
           Same("staged_slot", r, got.staged_slot, want.staged_slot) +
           Same("kept", r, got.kept, want.kept) +
           Same("group_sizes", r, got.group_sizes, want.group_sizes) +
           Same("num_recv", r, got.num_recv, want.num_recv) +
           Same("verdict", r, data_[r].verdict, verdict) + Same("most", r, data_[r].most, most) +
           Same("experts of slots", r, data_[r].slots, routed_.slots);
  }

  int CompareDispatch(int r) {
    const int64_t row_bytes = RowBytes();
    Bytes recv(c_.capacity * row_bytes, 0xFF);
    Floats weights(c_.capacity, 0.0f);
    for (int row = 0; row < c_.capacity; ++row) {
      const Row& from = routed_.rows[r][row];
      if (from.source >= 0) {
        std::memcpy(&recv[row * row_bytes], &tokens_[from.source][from.token * row_bytes],
                    row_bytes);
        weights[row] =
            c_.weighted ? topk_weights_[from.source][from.token * c_.top_k + from.slot] : 1.0f;
      } else if (row < routed_.zones[r]) {
        std::memset(&recv[row * row_bytes], 0, row_bytes);
      }
    }
    return Same("recv", r, data_[r].recv, recv) +
           Same("recv_weights", r, data_[r].recv_weights, weights);
  }

  int CompareCombine(int r) {
    Floats d_topk(c_.tokens * c_.top_k, 0.0f);
    for (int i = 0; i < c_.tokens * c_.top_k; ++i) {
      const int rank = routed_.plans[r].dst_rank[i];
      if (rank >= 0) d_topk[i] = row_weights_[rank][routed_.plans[r].dst_row[i]];
    }
    return Same("combine", r, data_[r].out,
                Combine(c_, routed_, expert_out_, c_.weighted ? &row_weights_ : nullptr, r)) +
           Same("d_tokens", r, data_[r].d_tokens, Combine(c_, routed_, expert_out_, nullptr, r)) +
           Same("d_topk_weights", r, data_[r].d_topk, d_topk);
  }

  int CompareCombineBwd(int r) {
    const int64_t row_bytes = RowBytes();
    const int size = ElementBytes(c_.type);
    Bytes want(c_.capacity * row_bytes, 0);
    Floats d_weights(c_.capacity, 0.0f);
    for (int row = 0; row < c_.capacity; ++row) {
      const Row& from = routed_.rows[r][row];
      if (from.source < 0) continue;
      const uint8_t* grad = &grad_[from.source][from.token * row_bytes];
      uint8_t* out = &want[row * row_bytes];
      for (int h = 0; h < c_.width; ++h) {
        const float w = c_.weighted ? row_weights_[r][row] : 1.0f;
        Narrow(c_.type, w * Widen(c_.type, grad + h * size), out + h * size);
      }
      d_weights[row] = HalvingDot(c_, grad, &expert_out_[r][row * row_bytes]);
    }
    int wrong = Same("d_expert_out", r, data_[r].d_expert_out, want);
    if (c_.weighted) wrong += Same("d_weights", r, data_[r].d_weights, d_weights);
    return wrong;
  }

  World& world_;
  Case c_;
  Grids grids_;
  std::mt19937 random_;
  std::vector<Ints> idx_;
  std::vector<Bytes> tokens_, grad_, expert_out_;
  std::vector<Floats> topk_weights_, row_weights_;
  std::vector<RankData> data_;
  Routed routed_;
};

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_CASE_RUNNER_H_
