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
  std::vector<Place> places;  // of the local ranks
  Purpose purpose;
};

// A group's NCCL side in this process: its communicators, and what its calls need to end together.
class NcclGroup {
 public:
  static std::shared_ptr<NcclGroup> Make(const Api& api, Devices devices, NcclGroupOptions options);
  // Joins the other ranks of the domains, which do so too; Abort from another thread ends it.
  Status Init(int64_t budget_ns);
  // As of Communicators, after Init.
  Status TrySum(int64_t budget_ns) { return communicators_->TrySum(budget_ns); }

  const NcclGroupOptions& options() const { return options_; }
  // "2.28.9".
  std::string version() const;
  // The communicator of the rank that the device drives, or null.
  Communicator* OfDevice(int device) const;

  // Whether that run may go on; RunStarts says why its first call decides. For the same reason a
  // call that fails later fills its results and says nothing to XLA.
  Status Decide(uint64_t run);
  // One call's part on one device: `issue` is called on the communicator inside an NCCL group, and
  // sends to `peers` and receives from them.
  Status Run(Communicator& communicator, const Peers& peers,
             const std::function<int(Comm*)>& issue);
  // The same in two steps: a call may launch its kernels before it waits for NCCL to launch.
  Status Issue(Communicator& communicator, const Peers& peers,
               const std::function<int(Comm*)>& issue);
  Status Await(Communicator& communicator);

  // Whether the generation goes on; a wait of a call asks.
  const nccl::Alive& alive() const { return communicators_->alive(); }
  // What came of a call that waited by itself: an error is the group's from then on.
  Status Ended(const Status& status);
  // That rank's process closed the group, after its last call: further ones that need it fail.
  void RankLeft(int64_t world_rank, const Status& why);
  // As of Communicators.
  bool AwaitFailure(int64_t timeout_ns, Status* failure) {
    return communicators_->AwaitFailure(timeout_ns, failure);
  }

  // The generation is over: every call under way and to come ends with `why`. Returns once all
  // communicators are aborted, or a bound is over.
  void Abort(const Status& why);
  // Counts running calls; false once closed.
  bool BeginCall() { return calls_.Begin(); }
  void EndCall() { calls_.End(); }
  // Refuses further calls, waits at most `timeout_ns` for the running ones, then ends the
  // communicators: in good order where nothing failed.
  void Close(int64_t timeout_ns);
  Status ClosedError(const std::string& layer) const;
  // The first error since the last time this was asked, or "".
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
  std::unordered_map<int64_t, Status> left_;  // by world rank
  bool told_ = false;
};

struct Layer {
  uint64_t id;
  std::string name;
  uint64_t fingerprint;
};

// What this process has open over NCCL.
using NcclRegistry = LayerTable<Layer, NcclGroup>;
NcclRegistry& ThisProcessGroups();

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_GROUP_H_
