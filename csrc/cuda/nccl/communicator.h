#ifndef EP_RUNTIME_CUDA_NCCL_COMMUNICATOR_H_
#define EP_RUNTIME_CUDA_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/nccl/abort_mark.h"

namespace ep_runtime {
namespace nccl {

// One rank of an EP domain that this process drives.
struct Place {
  int64_t world_rank;
  int device;   // CUDA ordinal
  int ranks;    // N of the domain
  int rank;     // EP rank in it
  UniqueId id;  // the domain's
};

// Whether the group goes on; its error ends every wait.
using Alive = std::function<Status()>;

// One non-blocking NCCL communicator. Any thread may use it; every call of NCCL on it is under one
// lock and returns at once, so aborting it never waits for another thread's wait.
class Communicator {
 public:
  Communicator(const Api& api, const Place& place) : api_(api), place_(place) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Place& place() const { return place_; }

  // Begins to join the others; the device must be current. Wait tells when it is done. At most so
  // many channels, each with buffers for every peer; 0: as many as NCCL thinks fastest.
  Status Start(int max_channels);
  // Begins what `issue` calls on the communicator, as one NCCL group; a thread of NCCL's puts it on
  // its stream. Wait comes before anything else of this communicator.
  Status Issue(const std::function<int(Comm*)>& issue);
  // Issue, and Wait: returns once all of it is on its stream. Until then XLA must not go on with
  // that stream. The first call may wait for peers, because NCCL connects to them when it first
  // needs them.
  Status Run(const std::function<int(Comm*)>& issue, int64_t budget_ns, const Alive& alive);
  // Until NCCL has finished what it does in the background.
  Status Wait(const char* what, int64_t budget_ns, const Alive& alive);
  // For what comes behind its exchanges; null before it is given, which comes before any.
  AbortMark* mark() const { return mark_.get(); }
  void GiveMark(std::unique_ptr<AbortMark> mark) { mark_ = std::move(mark); }
  // That the communicator is what was asked for.
  Status CheckShape();
  // What NCCL found out meanwhile, such as a lost connection.
  Status AsyncError();

  // Waits, at most `budget_ns`, until nothing of it is under way at NCCL, sockets included. Ranks
  // must not part before: a message that a peer still waits for would go with us.
  void Finalize(int64_t budget_ns, const Alive& alive);
  // Ends what runs on it and frees it; the device must be current. Idempotent. NCCL waits for the
  // device's kernels here, which end because of it.
  void Abort();
  bool gone();

 private:
  Status Poll(const char* what, bool* done);
  Status Gone(const char* what) const;

  const Api& api_;
  const Place place_;
  std::unique_ptr<AbortMark> mark_;
  std::mutex mutex_;
  Comm* comm_ = nullptr;
  bool aborted_ = false;
};

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_COMMUNICATOR_H_
