// NcclGroup: a group's communicators and calls.
#ifndef EP_RUNTIME_CUDA_NCCL_GROUP_H_
#define EP_RUNTIME_CUDA_NCCL_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/groups/layer_table.h"
#include "core/groups/running_calls.h"
#include "core/runs/run_starts.h"
#include "cuda/nccl/communicators.h"
#include "cuda/nccl/exchange.h"

namespace ep_runtime {
namespace nccl {

struct NcclGroupOptions {
  std::string name;
  uint64_t generation;
  int64_t ep_size;
  int64_t op_timeout_ns;
  std::vector<Place> places;  // places of the local ranks
  Purpose purpose;
};

// A group's communicators in this process, and the state that makes all its calls end together.
class NcclGroup {
 public:
  static std::shared_ptr<NcclGroup> Make(const Api& api, Devices devices, NcclGroupOptions options);
  // Joins the other ranks of the domains, while they do the same. Abort() from another thread ends
  // the wait.
  Status Init(int64_t budget_ns);
  // See Communicators::TrySum. Call this after Init.
  Status TrySum(int64_t budget_ns) { return communicators_->TrySum(budget_ns); }

  const NcclGroupOptions& options() const { return options_; }
  // NCCL's version, such as "2.28.9".
  std::string version() const;
  // Returns the communicator of the device's rank, or null.
  Communicator* OfDevice(int device) const;

  // Decides whether `run` starts. Its first call decides for all; RunStarts explains why. A call
  // that fails later fills its results with NaN but reports no error to XLA, for the same reason.
  Status Decide(uint64_t run);
  // Runs one call's part on one device: `issue` is called on the communicator inside an NCCL group,
  // and sends to `peers` and receives from them.
  Status Run(Communicator& communicator, const Peers& peers,
             const std::function<int(Comm*)>& issue);
  // Run() in two steps, so that a call can launch kernels before it waits for NCCL's launch.
  Status Issue(Communicator& communicator, const Peers& peers,
               const std::function<int(Comm*)>& issue);
  Status Await(Communicator& communicator);

  // Returns an error once the generation is over. Waits of calls check it.
  const nccl::Alive& alive() const { return communicators_->alive(); }
  // Reports how a call ended that did its own waiting. An error becomes the group's error.
  Status Ended(const Status& status);
  // Notes that the rank's process closed the group after its last call, so later calls that need
  // the rank fail with `why`.
  void RankLeft(int64_t world_rank, const Status& why);
  // See Communicators::AwaitFailure.
  bool AwaitFailure(int64_t timeout_ns, Status* failure) {
    return communicators_->AwaitFailure(timeout_ns, failure);
  }

  // Ends the generation: every call, running or later, ends with `why`. Returns once all
  // communicators are aborted, or after a bounded wait.
  void Abort(const Status& why);
  // Counts running calls. Returns false once the group is closed.
  bool BeginCall() { return calls_.Begin(); }
  void EndCall() { calls_.End(); }
  // Refuses further calls, waits at most `timeout_ns` for running ones, then ends the
  // communicators; if nothing failed, finalizes them first.
  void Close(int64_t timeout_ns);
  Status ClosedError(const std::string& layer) const;
  // Returns the first error since the last TakeError, or "".
  std::string TakeError();

 private:
  explicit NcclGroup(NcclGroupOptions options) : options_(std::move(options)) {}
  Status Alive() const;
  Status Left(const Communicator& communicator, const Peers& peers) const;

  const NcclGroupOptions options_;
  std::unique_ptr<Communicators> communicators_;

  RunningCalls calls_;
  RunStarts starts_;
  mutable std::mutex mutex_;
  Status over_;
  std::unordered_map<int64_t, Status> left_;  // why a world rank left
  bool told_ = false;
};

struct Layer {
  uint64_t id;
  std::string name;
  uint64_t fingerprint;
};

// Open groups of this process whose rows travel over NCCL, and their layers.
using NcclRegistry = LayerTable<Layer, NcclGroup>;
NcclRegistry& ThisProcessGroups();

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_GROUP_H_
