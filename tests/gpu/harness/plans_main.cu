// Checks plans of groups over nodes, made on one GPU for every rank in turn, against plain loops.
//
//   plans_main [check]
//
// The expert indices of all ranks are given, as an exchange between nodes would leave them.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda/nccl/node_plan.h"
#include "reference.h"

namespace gpu_test {
namespace {

namespace nccl = ep_runtime::nccl;

constexpr int32_t kPoison = 0x5A5A5A5A;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// An array of the plan: the kernels' and the expected one.
struct Array {
  const char* name;
  int32_t* device;
  Ints want;
};

struct NodeCase {
  Case shape;
  int node_size;
};

// Ranks in the order in which their rows arrive at a node: by place on their node, then by node.
Ints Sources(const NodeCase& c) {
  Ints sources;
  for (int local = 0; local < c.node_size; ++local) {
    for (int rank = local; rank < c.shape.ranks; rank += c.node_size) sources.push_back(rank);
  }
  return sources;
}

// The receiver's arrays of rank `me`.
RankPlan Received(const NodeCase& c, const Routed& routed, int me) {
  RankPlan plan = routed.plans[me];
  const int nodes = c.shape.ranks / c.node_size;
  const int half = (nodes * c.shape.tokens + 1) / 2;
  plan.recv_count.assign(c.node_size * 4, 0);
  plan.staged_start.clear();
  plan.staged_row.clear();
  plan.staged_slot.clear();
  const Ints sources = Sources(c);
  for (size_t i = 0; i < sources.size(); ++i) {
    const RankPlan& from = routed.plans[sources[i]];
    int32_t* count = &plan.recv_count[i / nodes * 4];
    for (int token = 0; token < c.shape.tokens; ++token) {
      const size_t first = plan.staged_row.size();
      for (int k = 0; k < c.shape.top_k; ++k) {
        const int slot = token * c.shape.top_k + k;
        if (from.dst_rank[slot] != me) continue;
        plan.staged_row.push_back(from.dst_row[slot]);
        plan.staged_slot.push_back(k);
      }
      if (plan.staged_row.size() == first) continue;
      plan.staged_start.push_back(static_cast<int32_t>(first));
      ++count[0];
      count[1] += static_cast<int32_t>(plan.staged_row.size() - first);
      count[2] += static_cast<int>(i) % nodes * c.shape.tokens + token < half ? 1 : 0;
    }
  }
  const auto entries = static_cast<int32_t>(plan.staged_row.size());
  plan.staged_start.resize(c.shape.ranks * c.shape.tokens + 1, entries);
  plan.staged_row.resize(c.shape.capacity, -1);
  plan.staged_slot.resize(c.shape.capacity, -1);
  return plan;
}

// Counts slots that ask for the rank and have no row.
int32_t Dropped(const NodeCase& c, const std::vector<Ints>& idx, const RankPlan& plan, int me) {
  const int local = c.shape.experts / c.shape.ranks;
  int32_t asked = 0;
  for (const Ints& of_rank : idx) {
    for (const int expert : of_rank) asked += expert >= 0 && expert / local == me ? 1 : 0;
  }
  for (const int32_t kept : plan.kept) asked -= kept;
  return asked;
}

std::vector<Ints> Indices(const Case& c, std::mt19937* random) {
  std::vector<Ints> idx(c.ranks, Ints(c.tokens * c.top_k));
  for (Ints& of_rank : idx) {
    for (int32_t& expert : of_rank) {
      const auto drawn = static_cast<int>((*random)() % (c.experts + 3)) - 2;
      expert = c.routing == 2 ? c.experts / 2 : c.routing == 4 ? drawn * drawn / c.experts : drawn;
    }
  }
  return idx;
}

int32_t* OnDevice(const Ints& values) {
  int32_t* made = nullptr;
  Check(cudaMalloc(&made, values.size() * 4 + 4), "cudaMalloc");
  Check(cudaMemcpy(made, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  return made;
}

int Wrong(const NodeCase& c, const std::vector<Ints>& idx, const Routed& routed, int me) {
  const Case& shape = c.shape;
  const int nodes = shape.ranks / c.node_size;
  RankPlan plan = Received(c, routed, me);
  plan.recv_count[3] = Dropped(c, idx, plan, me);
  Ints virtual_rank, virtual_row, all;
  for (int node = 0; node < nodes; ++node) {
    const RankPlan& from = routed.plans[node * c.node_size + me % c.node_size];
    for (size_t slot = 0; slot < from.dst_rank.size(); ++slot) {
      const int rank = from.dst_rank[slot];
      const bool here = rank >= 0 && rank / c.node_size == me / c.node_size;
      virtual_rank.push_back(here ? rank % c.node_size : -1);
      virtual_row.push_back(here ? from.dst_row[slot] : -1);
    }
  }
  for (const Ints& of_rank : idx) all.insert(all.end(), of_rank.begin(), of_rank.end());
  const char* names[] = {"dst_rank",   "dst_row",      "recv_count",  "staged_start",
                         "staged_row", "staged_slot",  "kept",        "group_sizes",
                         "num_recv",   "virtual_rank", "virtual_row", "chunks"};
  const Ints wants[] = {plan.dst_rank,   plan.dst_row,     plan.recv_count, plan.staged_start,
                        plan.staged_row, plan.staged_slot, plan.kept,       plan.group_sizes,
                        plan.num_recv,   virtual_rank,     virtual_row,     Ints{1}};
  std::vector<Array> arrays;
  for (int i = 0; i < 12; ++i) {
    arrays.push_back({names[i], OnDevice(Ints(wants[i].size(), kPoison)), wants[i]});
  }
  const int local = shape.experts / shape.ranks;
  const int64_t words = nccl::NodePlanScratch(shape.ranks, shape.tokens, shape.top_k, local);
  nccl::NodePlanParams params{};
  params.ranks = shape.ranks;
  params.node_size = c.node_size;
  params.me = me;
  params.tokens = shape.tokens;
  params.top_k = shape.top_k;
  params.experts = local;
  params.capacity = shape.capacity;
  params.alignment = shape.alignment;
  params.row_alignment = shape.row_alignment();
  int32_t* given = OnDevice(all);
  params.idx = given;
  int32_t** outputs[] = {&params.dst_rank,     &params.dst_row,     &params.recv_count,
                         &params.staged_start, &params.staged_row,  &params.staged_slot,
                         &params.kept,         &params.group_sizes, &params.num_recv,
                         &params.virtual_rank, &params.virtual_row, &params.chunks};
  for (int i = 0; i < 12; ++i) *outputs[i] = arrays[i].device;
  params.scratch = OnDevice(Ints(words, kPoison));
  int wrong = 0;
  Check(nccl::LaunchNodePlan(nullptr, params), "LaunchNodePlan");
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (Array& array : arrays) {
    Ints got(array.want.size());
    Check(cudaMemcpy(got.data(), array.device, got.size() * 4, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] == array.want[i]) continue;
      if (wrong < 8) {
        std::printf("WRONG %s, rank %d: %s[%zu] is %d, wanted %d\n", shape.name, me, array.name, i,
                    got[i], array.want[i]);
      }
      ++wrong;
      break;
    }
    cudaFree(array.device);
  }
  cudaFree(given);
  cudaFree(params.scratch);
  return wrong;
}

int CheckAll() {
  //                         ranks tokens width top_k experts alignment capacity
  const NodeCase cases[] = {
      {{"two nodes of one", 2, 300, 0, 4, 16, 8, 1400, RowType::kF32, 0, false}, 1},
      {{"drops", 2, 300, 0, 4, 16, 8, 400, RowType::kF32, 0, false}, 1},
      {{"drops, rows closer than that", 2, 300, 0, 4, 16, 8, 400, RowType::kF32, 0, false,
        CombinePrecision::kFast, false, 1},
       1},
      {{"two nodes of four", 8, 200, 0, 3, 32, 16, 900, RowType::kF32, 4, false}, 4},
      {{"four nodes of two", 8, 77, 0, 8, 64, 4, 700, RowType::kF32, 0, false}, 2},
      {{"all to one expert", 4, 130, 0, 2, 8, 128, 1280, RowType::kF32, 2, false}, 2},
      {{"one token", 4, 1, 0, 2, 8, 1, 8, RowType::kF32, 0, false}, 2},
      {{"many", 64, 512, 0, 8, 256, 128, 5120, RowType::kF32, 0, false}, 8},
      {{"many experts", 8, 4096, 0, 8, 2048, 8, 40000, RowType::kF32, 4, false}, 1},
  };
  std::mt19937 random(7);
  int wrong = 0, checked = 0;
  for (const NodeCase& c : cases) {
    const std::vector<Ints> idx = Indices(c.shape, &random);
    const Routed routed = Route(c.shape, idx);
    for (int me = 0; me < c.shape.ranks; me += c.shape.ranks > 8 ? 13 : 1) {
      wrong += Wrong(c, idx, routed, me);
      checked += 12;
    }
  }
  std::printf("%d of %d arrays wrong\n", wrong, checked);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gpu_test

int main() { return gpu_test::CheckAll(); }
