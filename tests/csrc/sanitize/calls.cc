// Calls of the CPU library from many threads, without XLA and Python, for sanitizers. `run.py`
// creates the memory, starts one such program for each process of a group, and describes the group
// by pairs of words. Every row must come back. If a rank gives wrong operands, the call of that run
// must fail on every rank, and the next run must succeed.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/groups/registry.h"
#include "core/runs/runs.h"
#include "ffi/c_table.h"
#include "ffi/cpu_call.h"
#include "ffi/site.h"

extern "C" const void* EpRuntimeTable();

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

using OpFn = Status (*)(const CallFrame&, CallContext);
constexpr uint64_t kFingerprint = 77;
constexpr int kFailsEvery = 16;  // one round in so many gets wrong operands
constexpr int64_t kCloseNs = 20'000'000'000;

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "calls: %s\n", why.c_str());
  std::_Exit(1);
}

struct Words {
  std::map<std::string, std::string> all;
  const std::string& operator[](const char* name) const {
    const auto found = all.find(name);
    if (found == all.end()) Die(std::string("no word ") + name);
    return found->second;
  }
  int64_t Number(const char* name) const { return std::stoll((*this)[name]); }
  template <typename T>
  std::vector<T> Numbers(const char* name) const {
    std::vector<T> out;
    std::istringstream text((*this)[name]);
    for (int64_t value; text >> value;) out.push_back(static_cast<T>(value));
    return out;
  }
};

// One operand or result in separate memory, exactly as long as the array.
struct Array {
  std::vector<int32_t> words;
  Buffer buffer;

  Array(ffi::DataType type, Dims dims) : buffer{nullptr, type, std::move(dims)} {
    words.resize(buffer.bytes() / sizeof(int32_t));
    words.shrink_to_fit();
    buffer.data = words.data();
  }
  float* floats() { return reinterpret_cast<float*>(words.data()); }
};

Array Ints(Dims dims) { return Array(ffi::DataType::S32, std::move(dims)); }
Array Floats(Dims dims) { return Array(ffi::DataType::F32, std::move(dims)); }

// The calls of one layer: the sites of an executable, for every rank of this process.
struct Program {
  Site prepare, dispatch, combine, combine_bwd, dispatch_bwd;

  explicit Program(uint64_t layer)
      : prepare({OpCode::kPrepare, layer, kFingerprint, 0}),
        dispatch({OpCode::kDispatch, layer, kFingerprint, 0}),
        combine({OpCode::kCombine, layer, kFingerprint, 0}),
        combine_bwd({OpCode::kCombineBwd, layer, kFingerprint, 0}),
        dispatch_bwd({OpCode::kDispatchBwd, layer, kFingerprint, 0}) {}
};

// One rank of one layer, with its arrays and its rounds.
class Rank {
 public:
  Rank(const Words& words, uint64_t layer, Program* program, int64_t rank)
      : layer_(layer),
        program_(program),
        rank_(rank),
        tokens_(words.Number("max_tokens_per_rank")),
        top_k_(words.Number("max_top_k")),
        width_(words.Number("hidden_size")),
        experts_(words.Number("num_experts")),
        x_(Floats({tokens_, width_})),
        back_(Floats({tokens_, width_})),
        choices_(Ints({tokens_, top_k_})),
        weights_(Floats({tokens_, top_k_})) {
    const int64_t ranks = words.Number("ep_size");
    capacity_ = words.Number("recv_capacity_per_rank");
    const int64_t local = experts_ / ranks;
    for (const Dims& dims :
         {Dims{tokens_, top_k_}, Dims{tokens_, top_k_}, Dims{ranks, 4}, Dims{ranks * tokens_ + 1},
          Dims{capacity_}, Dims{capacity_}, Dims{local}, Dims{local}, Dims{1}}) {
      plan_.push_back(Ints(dims));
    }
  }

  // Returns true if the round ran as it should and all rows came back.
  bool Round(uint64_t run, uint64_t round, bool fails) {
    Fill(round);
    if (fails && rank_ == 0) choices_.words[0] = static_cast<int32_t>(experts_);
    std::vector<Buffer> plan;
    for (Array& array : plan_) plan.push_back(array.buffer);
    Array none = Floats({0, 0}), no_weights = Floats({0});
    Array recv = Floats({capacity_, width_}), recv_weights = Floats({capacity_});
    Array d_recv = Floats({capacity_, width_}), d_weights = Floats({0});
    Array zeros = Floats({capacity_}), d_topk = Floats({tokens_, top_k_});
    const bool whole =
        Calls(&program_->prepare, OpCode::kPrepare, CallPrepare, run, {choices_.buffer}, plan) &&
        Calls(&program_->dispatch, OpCode::kDispatch, CallDispatch, run,
              With({x_.buffer, weights_.buffer}, plan), {recv.buffer, recv_weights.buffer}) &&
        Calls(&program_->combine, OpCode::kCombine, CallCombine, run,
              With({recv.buffer, no_weights.buffer}, plan), {back_.buffer}) &&
        Same() &&
        Calls(&program_->combine_bwd, OpCode::kCombineBwd, CallCombineBwd, run,
              With({x_.buffer, none.buffer, no_weights.buffer}, plan),
              {d_recv.buffer, d_weights.buffer}) &&
        Calls(&program_->dispatch_bwd, OpCode::kDispatchBwd, CallDispatchBwd, run,
              With({d_recv.buffer, zeros.buffer}, plan), {back_.buffer, d_topk.buffer}) &&
        Same();
    return whole;
  }

  const std::string& error() const { return error_; }

 private:
  static std::vector<Buffer> With(std::vector<Buffer> first, const std::vector<Buffer>& plan) {
    first.insert(first.end(), plan.begin(), plan.end());
    return first;
  }

  void Fill(uint64_t round) {
    std::mt19937 random(static_cast<uint32_t>(round * 1000003 + layer_ * 101 + rank_));
    for (int64_t i = 0; i < tokens_ * width_; ++i) {
      x_.floats()[i] = static_cast<float>(static_cast<int32_t>(random() % 16) - 8);
    }
    for (int64_t token = 0; token < tokens_; ++token) {
      const auto first = static_cast<int64_t>(random() % experts_);
      for (int64_t slot = 0; slot < top_k_; ++slot) {
        choices_.words[token * top_k_ + slot] = static_cast<int32_t>((first + slot) % experts_);
        weights_.floats()[token * top_k_ + slot] = 1.0f;
      }
    }
  }

  // A token comes back once for each of its experts, and sums of small integers are exact.
  bool Same() {
    for (int64_t i = 0; i < tokens_ * width_; ++i) {
      if (back_.floats()[i] != x_.floats()[i] * static_cast<float>(top_k_)) {
        Die("rank " + std::to_string(rank_) + ": element " + std::to_string(i) + " is wrong");
      }
    }
    return true;
  }

  bool Calls(Site* site, OpCode op, OpFn function, uint64_t run, std::vector<Buffer> args,
             std::vector<Buffer> rets) {
    Array rank = Ints({1}), index = Ints({1});
    CallFrame frame{OpName(op), op, With({rank.buffer, index.buffer}, args), std::move(rets)};
    const Status status = InGroup(frame, site, run, function);
    if (!status.ok()) error_ = status.text();
    return status.ok();
  }

  // Like targets_cpu.cc.
  Status InGroup(const CallFrame& frame, Site* site, uint64_t run, OpFn function) {
    const Site::Turn turn = site->Next(run, static_cast<int32_t>(rank_));
    CallContext context;
    EP_RETURN_IF_ERROR(
        ThisProcess().registry.Resolve(layer_, kFingerprint, &context.layer, &context.group));
    std::shared_ptr<Group> group = context.group;
    if (!group->BeginCall()) return group->ClosedError(context.layer.name);
    Status status = group->AtStart(run, context.layer.name, frame.op);
    if (status.ok()) {
      context.op = frame.op;
      context.world_rank = rank_;
      context.run = run;
      context.key =
          group->several_processes() ? site->KeyEverywhere(turn) : site->KeyHere(run, turn);
      if (group->several_processes()) context.site = site->Named(turn);
      status = function(frame, std::move(context));
    }
    if (!status.ok()) group->FailRun(run, status);
    group->EndCall();
    return status;
  }

  const uint64_t layer_;
  Program* const program_;
  const int64_t rank_, tokens_, top_k_, width_, experts_;
  int64_t capacity_;
  Array x_, back_, choices_, weights_;
  std::vector<Array> plan_;
  std::string error_;
};

void Rounds(Rank* rank, uint64_t layer, int64_t rounds) {
  for (int64_t round = 0; round < rounds; ++round) {
    const bool fails = round % kFailsEvery == kFailsEvery - 1;
    const uint64_t run =
        (layer << 24) + static_cast<uint64_t>(round);  // like XLA's: a hash and a count
    if (rank->Round(run, static_cast<uint64_t>(round), fails) == fails) {
      Die("round " + std::to_string(round) + (fails ? " did not fail" : ": " + rank->error()));
    }
  }
}

int64_t Open(const Words& words) {
  const auto* table = static_cast<const EpTable*>(EpRuntimeTable());
  const auto ranks = words.Numbers<int64_t>("local_ranks");
  const auto windows = words.Numbers<int>("window_fds");
  EpGroupOptions options{};
  options.name = words["name"].c_str();
  options.generation = static_cast<uint64_t>(words.Number("generation"));
  options.world_size = words.Number("world_size");
  options.ep_size = words.Number("ep_size");
  options.num_experts = words.Number("num_experts");
  options.hidden_size = words.Number("hidden_size");
  options.max_tokens_per_rank = words.Number("max_tokens_per_rank");
  options.recv_capacity_per_rank = words.Number("recv_capacity_per_rank");
  options.max_top_k = words.Number("max_top_k");
  options.max_token_bytes = sizeof(float);
  options.lanes = words.Number("lanes");
  options.settings = words["settings"].c_str();
  options.debug = 1;
  options.local_ranks = ranks.data();
  options.num_local_ranks = static_cast<int64_t>(ranks.size());
  char text[4096];
  const int64_t group =
      table->open_group(&options, static_cast<int>(words.Number("board_fd")), windows.data(),
                        static_cast<int64_t>(windows.size()), {text, sizeof(text)});
  if (group < 0) Die(text);
  return group;
}

// Does what Python's threads do meanwhile: adds and removes layers, and asks for errors.
void Meddle(int64_t group, const std::atomic<bool>& over) {
  const auto* table = static_cast<const EpTable*>(EpRuntimeTable());
  char text[4096];
  const uint64_t id = 900;
  while (!over.load()) {
    const EpLayer other{id, "other", kFingerprint, 1, 1, 1, 9};
    if (table->add_layers(group, &other, 1, {text, sizeof(text)}) < 0) Die(text);
    table->check_group(group, {text, sizeof(text)});
    table->remove_layers(group, &id, 1);
    std::this_thread::yield();
  }
}

void Main(const Words& words) {
  const auto* table = static_cast<const EpTable*>(EpRuntimeTable());
  const int64_t group = Open(words);
  const int64_t num_layers = words.Number("lanes");
  std::vector<std::unique_ptr<Program>> programs;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::thread> threads;
  char text[4096];
  for (int64_t i = 1; i <= num_layers; ++i) {
    const auto id = static_cast<uint64_t>(i);
    const EpLayer layer{
        id, "moe", kFingerprint, words.Number("max_top_k"), 1, 1, static_cast<uint32_t>(i)};
    if (table->add_layers(group, &layer, 1, {text, sizeof(text)}) < 0) Die(text);
    programs.push_back(std::make_unique<Program>(id));
  }
  std::atomic<bool> over{false};
  std::thread meddler([&] { Meddle(group, over); });
  for (int64_t i = 1; i <= num_layers; ++i) {
    for (int64_t rank : words.Numbers<int64_t>("local_ranks")) {
      const auto id = static_cast<uint64_t>(i);
      ranks.push_back(std::make_unique<Rank>(words, id, programs[i - 1].get(), rank));
      threads.emplace_back(Rounds, ranks.back().get(), id, words.Number("rounds"));
    }
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  meddler.join();
  table->close_group(group, kCloseNs);
}

}  // namespace
}  // namespace ep_runtime

int main(int argc, char** argv) {
  ep_runtime::Words words;
  for (int i = 1; i + 1 < argc; i += 2) words.all[argv[i]] = argv[i + 1];
  ep_runtime::Main(words);
  std::puts("done");
  return 0;
}
