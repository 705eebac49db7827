// A libnccl without GPUs. Communicators of one process meet in memory, and switches make them fail.
// Counters of calls let tests check that nothing leaks and nothing is called twice.

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace {

enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
};

struct Transfer {
  const void* from;
  void* to;
  size_t bytes;
  int peer;
};

struct Comm {
  std::string id;
  int ranks;
  int rank;
  bool finalized = false;
  bool in_flight = false;
  std::vector<Transfer> sends, receives;
  int* summed = nullptr;  // sum of a posted all-reduce: one int32
  int sum = 0;            // sum of the ranks that have posted it
  int summed_by = 0;
};

struct State {
  std::mutex mutex;
  std::map<std::string, std::map<int, Comm*>> joined;  // by id and rank
  int version = 22809;
  int init_result = kInProgress;
  int id_result = kSuccess;
  bool never_ready = false;
  bool never_done = false;  // true: calls stay in progress
  bool never_final = false;
  int async_error = kSuccess;
  std::atomic<int> inits{0}, aborts{0}, finalizes{0}, ids{0}, hangs{0};
  int max_ctas = 0;  // max_ctas of the last init
  int wrong_sum = 0;
  bool wait_for_all_aborts = false;  // true: as NCCL does between communicators of one process
};

State& state() {
  static auto* const made = new State;
  return *made;
}

thread_local std::vector<Comm*> group;
thread_local int depth = 0;

bool Complete(const Comm& comm) {
  auto& ranks = state().joined[comm.id];
  return static_cast<int>(ranks.size()) == comm.ranks;
}

// Ends this communicator's sum once all ranks have added to it. Returns true if the sum has ended,
// or if there was none.
bool Summed(Comm* comm) {
  if (comm->summed == nullptr) return true;
  if (comm->summed_by < comm->ranks) return false;
  *comm->summed = comm->sum + state().wrong_sum;
  comm->summed = nullptr;
  comm->sum = comm->summed_by = 0;
  return true;
}

// Moves everything that both sides have posted. Returns true once `comm` has nothing left.
bool Deliver(Comm* comm) {
  for (auto receive = comm->receives.begin(); receive != comm->receives.end();) {
    auto found = state().joined[comm->id].find(receive->peer);
    bool moved = false;
    if (found != state().joined[comm->id].end()) {
      for (auto send = found->second->sends.begin(); send != found->second->sends.end(); ++send) {
        if (send->peer != comm->rank) continue;
        std::memcpy(receive->to, send->from, receive->bytes);
        found->second->sends.erase(send);
        moved = true;
        break;
      }
    }
    receive = moved ? comm->receives.erase(receive) : receive + 1;
  }
  return comm->receives.empty() && comm->sends.empty() && Summed(comm);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int ncclGetVersion(int* version) {
  *version = state().version;
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "fake error";
}
EXPORT const char* ncclGetLastError(Comm*) { return ""; }

EXPORT int ncclGetUniqueId(UniqueId* id) {
  if (state().id_result != kSuccess) return state().id_result;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->bytes, "fake", 4);
  std::random_device random;
  for (int byte = 8; byte < 24; ++byte) id->bytes[byte] = static_cast<char>(random());
  ++state().ids;
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size != 48) {
    return kInvalidArgument;
  }
  ++state().inits;
  state().max_ctas = config->max_ctas;
  *comm = new Comm{std::string(id.bytes, sizeof(id.bytes)), ranks, rank};
  if (state().init_result == kInProgress || state().init_result == kSuccess) {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().joined[(*comm)->id][rank] = *comm;
  }
  return state().init_result;
}

EXPORT int ncclCommGetAsyncError(Comm* comm, int* error) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *error = state().async_error;
  if (*error != kSuccess) return kSuccess;
  if (comm->finalized) {
    *error = state().never_final ? kInProgress : kSuccess;
    return kSuccess;
  }
  if (state().never_ready || !Complete(*comm)) *error = kInProgress;
  if (comm->in_flight) {
    if (!state().never_done && Deliver(comm)) comm->in_flight = false;
    if (comm->in_flight) *error = kInProgress;
  }
  return kSuccess;
}

EXPORT int ncclCommFinalize(Comm* comm) {
  std::lock_guard<std::mutex> lock(state().mutex);
  ++state().finalizes;
  comm->finalized = true;
  return kInProgress;
}

EXPORT int ncclCommAbort(Comm* comm) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    ++state().aborts;
    state().joined[comm->id].erase(comm->rank);
  }
  // If one communicator of this process is aborted alone, its abort waits for the next one.
  for (int spin = 0; state().wait_for_all_aborts && state().aborts < state().inits; ++spin) {
    if (spin > 100'000'000) {
      ++state().hangs;
      break;
    }
  }
  delete comm;
  return kSuccess;
}

EXPORT int ncclCommCount(const Comm* comm, int* ranks) {
  *ranks = comm->ranks;
  return kSuccess;
}
EXPORT int ncclCommUserRank(const Comm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}

EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
EXPORT int ncclGroupEnd() {
  if (--depth < 0) return kInvalidArgument;
  std::lock_guard<std::mutex> lock(state().mutex);
  for (Comm* comm : group) comm->in_flight = true;
  group.clear();
  return kInProgress;
}

static int Post(Comm* comm, const Transfer& transfer, bool sends) {
  if (depth == 0 || transfer.peer < 0 || transfer.peer >= comm->ranks) return kInvalidArgument;
  std::lock_guard<std::mutex> lock(state().mutex);
  (sends ? comm->sends : comm->receives).push_back(transfer);
  if (group.empty() || group.back() != comm) group.push_back(comm);
  return kSuccess;
}

EXPORT int ncclSend(const void* from, size_t count, int, int peer, Comm* comm, void*) {
  return Post(comm, {from, nullptr, count, peer}, true);
}
EXPORT int ncclRecv(void* to, size_t count, int, int peer, Comm* comm, void*) {
  return Post(comm, {nullptr, to, count, peer}, false);
}

EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int, int, Comm* comm, void*) {
  if (depth == 0 || count != 1) return kInvalidArgument;
  std::lock_guard<std::mutex> lock(state().mutex);
  comm->summed = static_cast<int*>(to);
  for (auto& [rank, peer] : state().joined[comm->id]) {
    peer->sum += *static_cast<const int*>(from);
    ++peer->summed_by;
  }
  group.push_back(comm);
  return kSuccess;
}

// Tests call FakeSet("never_ready", 1) and FakeGet("aborts").
EXPORT void FakeSet(const char* name, int value) {
  const std::string field = name;
  State& now = state();
  if (field == "version") now.version = value;
  if (field == "init_result") now.init_result = value;
  if (field == "id_result") now.id_result = value;
  if (field == "never_ready") now.never_ready = value != 0;
  if (field == "never_done") now.never_done = value != 0;
  if (field == "never_final") now.never_final = value != 0;
  if (field == "async_error") now.async_error = value;
  if (field == "wait_for_all_aborts") now.wait_for_all_aborts = value != 0;
  if (field == "wrong_sum") now.wrong_sum = value;
  if (field == "counts") now.inits = now.aborts = now.finalizes = now.ids = now.hangs = value;
}
EXPORT int FakeGet(const char* name) {
  const std::string field = name;
  if (field == "inits") return state().inits;
  if (field == "aborts") return state().aborts;
  if (field == "finalizes") return state().finalizes;
  if (field == "ids") return state().ids;
  if (field == "max_ctas") return state().max_ctas;
  return field == "hangs" ? state().hangs.load() : -1;
}
