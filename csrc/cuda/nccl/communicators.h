#ifndef EP_RUNTIME_CUDA_NCCL_COMMUNICATORS_H_
#define EP_RUNTIME_CUDA_NCCL_COMMUNICATORS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/nccl/communicator.h"

namespace ep_runtime {
namespace nccl {

// What the set needs of the devices; tests give their own.
struct Devices {
  // Makes the device current on the calling thread.
  std::function<Status(int device)> set;
  // Moves a few bytes between all ranks of the domain, so that what cannot connect says so while
  // the group forms, and the first step pays for no connection.
  std::function<Status(Communicator&, int64_t budget_ns, const Alive& alive)> try_out;
  // The mark of a communicator of the current device.
  std::function<Status(std::unique_ptr<AbortMark>*)> make_mark;
  // An all-reduce of the domain's ranks, whose sums must be exact.
  std::function<Status(Communicator&, int64_t budget_ns, const Alive& alive)> try_sum;
};

// What communicators are for.
struct Purpose {
  // Rows travel over them: they connect to all peers at once, and have abort marks. Without, NCCL
  // connects, allocates buffers and runs kernels when something first calls it.
  bool carries_rows = true;
  int max_channels = 0;  // 0: as many as NCCL thinks fastest
};

// The communicators of one group in this process: one per local rank, made together, watched by a
// thread, and aborted together. A communicator that is aborted alone leaves its peers' kernels
// spinning, and a thread that aborts one after the other waits for a kernel that waits for the
// next.
class Communicators {
 public:
  // `alive` says whether the generation may be used; it is asked from several threads, never after
  // Close has returned.
  Communicators(const Api& api, Devices devices, Alive alive, Purpose purpose,
                const std::vector<Place>& places);
  ~Communicators() { Close(0); }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // Joins all domains; every rank of theirs must do so meanwhile. Whatever fails, all are aborted.
  Status Init(int64_t budget_ns);
  // An all-reduce over each, checked; every rank of the domains must do so meanwhile. A failure is
  // the set's.
  Status TrySum(int64_t budget_ns);
  // The communicator of a local rank, or null.
  Communicator* OfRank(int64_t world_rank) const;
  // The first error since Init, after which nothing of the set can be used; success before.
  Status Failure() const;
  // What came of an op, or why the generation is over, which says more. NCCL may notice that a peer
  // is gone before those who know which process it was have said so: that is waited for, shortly.
  Status Explained(const Status& error);
  // An op failed: keeps its error as the set's and has everything aborted soon.
  void Fail(const Status& error);
  // Waits for that, at most `timeout_ns`: the failure, or success where there is none yet. False
  // once Close has begun.
  bool AwaitFailure(int64_t timeout_ns, Status* failure);
  const Alive& alive() const { return alive_; }
  int version() const { return api_.version; }

  // Aborts all, each on a thread of its own, and waits for that with a bound: a device that hangs
  // must not hang us. Idempotent.
  void Abort();
  // Waits, at most `finalize_ns`, until peers have what was sent to them; then Abort. No call may
  // begin any more. Idempotent.
  void Close(int64_t finalize_ns);

 private:
  // What threads that outlive a bound may still use.
  struct Asked {
    std::mutex mutex;
    Alive alive;  // null once closed
  };
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    int busy = 0;
    Status error;
  };

  bool OnEach(std::function<Status(Communicator&)> work, std::chrono::nanoseconds bound,
              Status* first_error);
  void Watch();
  void StopWatching();

  const Api& api_;
  const Devices devices_;
  const Purpose purpose_;
  const std::shared_ptr<Asked> asked_ = std::make_shared<Asked>();
  const Alive alive_;
  std::vector<std::shared_ptr<Communicator>> all_;

  mutable std::mutex mutex_;
  std::condition_variable stop_or_failed_;
  Status failure_;
  bool stopping_ = false;
  std::condition_variable abort_ended_;
  bool abort_begun_ = false;
  bool abort_over_ = false;
  std::thread watcher_;
};

}  // namespace nccl

// How the communicators reach devices: CUDA's in the library, others in tests.
nccl::Devices NcclDevices();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_COMMUNICATORS_H_
