// Communicator: one NCCL communicator.
#ifndef EP_RUNTIME_CUDA_NCCL_COMMUNICATOR_H_
#define EP_RUNTIME_CUDA_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/nccl/abort_mark.h"

namespace ep_runtime {
namespace nccl {

// One rank of an EP domain, driven by this process.
struct Place {
  int64_t world_rank;
  int device;   // CUDA ordinal
  int ranks;    // N, ranks of the domain
  int rank;     // EP rank in the domain
  UniqueId id;  // unique id of the domain
};

// A function that returns an error once the group has failed. Waits then end with that error.
using Alive = std::function<Status()>;

// One non-blocking NCCL communicator. Any thread may use it. Every NCCL call on it holds one lock
// and returns at once, so an abort never waits for another thread's wait.
class Communicator {
 public:
  Communicator(const Api& api, const Place& place) : api_(api), place_(place) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Place& place() const { return place_; }

  // Begins to join the other ranks; the device must be current. Wait() returns once all have
  // joined. Uses at most `max_channels` channels, each with buffers for every peer; 0: NCCL's
  // choice.
  Status Start(int max_channels);
  // Begins the calls of `issue` on the communicator, as one NCCL group. NCCL's thread puts them on
  // their stream. Call Wait before anything else on this communicator.
  Status Issue(const std::function<int(Comm*)>& issue);
  // Runs Issue, then Wait: returns once all calls are on their stream. XLA must not use that stream
  // before. The first call may wait for peers, because NCCL connects to them when it first needs
  // them.
  Status Run(const std::function<int(Comm*)>& issue, int64_t budget_ns, const Alive& alive);
  // Waits until NCCL has finished its background work.
  Status Wait(const char* what, int64_t budget_ns, const Alive& alive);
  // The mark for kernels after exchanges. Null until GiveMark, which is called before any exchange.
  AbortMark* mark() const { return mark_.get(); }
  void GiveMark(std::unique_ptr<AbortMark> mark) { mark_ = std::move(mark); }
  // Checks that the communicator has the ranks and the device that were asked for.
  Status CheckShape();
  // Returns an error that NCCL found in the background, such as a lost connection.
  Status AsyncError();

  // Waits at most `budget_ns` until NCCL has finished all transfers, including on sockets. If a
  // rank left earlier, a message that a peer still waits for would be lost.
  void Finalize(int64_t budget_ns, const Alive& alive);
  // Ends all operations on the communicator and frees it; the device must be current. Idempotent.
  // NCCL waits here for the device's kernels, which end because of the abort.
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
