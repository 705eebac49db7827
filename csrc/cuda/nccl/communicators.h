// Communicators: the communicators of one group in this process.
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

// Functions of devices that Communicators uses. Tests pass their own.
struct Devices {
  // Makes the device current on the calling thread.
  std::function<Status(int device)> set;
  // Moves a few bytes between all ranks of the domain, so that a failed connection shows while the
  // group forms, and the first step need not connect.
  std::function<Status(Communicator&, int64_t budget_ns, const Alive& alive)> try_out;
  // Makes the mark of a communicator of the current device.
  std::function<Status(std::unique_ptr<AbortMark>*)> make_mark;
  // Runs an all-reduce over the domain's ranks, and checks its sums.
  std::function<Status(Communicator&, int64_t budget_ns, const Alive& alive)> try_sum;
};

// The purpose of a group's communicators.
struct Purpose {
  // If true, rows are sent over the communicators: they connect to all peers when they are created,
  // and have abort marks. If false, NCCL connects, allocates buffers and runs kernels on first use.
  bool carries_rows = true;
  int max_channels = 0;  // 0: NCCL's choice
};

// The communicators of one group in this process: one per local rank, created together, watched by
// a thread, and aborted together. If one were aborted alone, its peers' kernels would keep
// spinning. A thread that aborted one after another would wait for a kernel that waits for the next
// communicator.
class Communicators {
 public:
  // `alive` returns an error once the generation is over. Several threads call it, but none after
  // Close has returned.
  Communicators(const Api& api, Devices devices, Alive alive, Purpose purpose,
                const std::vector<Place>& places);
  ~Communicators() { Close(0); }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // Joins all domains, while every rank of these domains does the same. If anything fails, all
  // communicators are aborted.
  Status Init(int64_t budget_ns);
  // Checks an all-reduce over each communicator, while every rank of the domains does the same. A
  // failure fails all of them.
  Status TrySum(int64_t budget_ns);
  // Returns the communicator of a local rank, or null.
  Communicator* OfRank(int64_t world_rank) const;
  // Returns the first error since Init, after which no communicator can be used, or success.
  Status Failure() const;
  // Returns the reason why the generation is over, or else the op's error. NCCL may notice a lost
  // peer before the daemons report which process it was, so this waits briefly for their report.
  Status Explained(const Status& error);
  // Records the error of a failed op as the error of all, and makes Watch abort all communicators
  // soon.
  void Fail(const Status& error);
  // Waits at most `timeout_ns` for a failure. `failure` is success if there is none yet. Returns
  // false once Close has begun.
  bool AwaitFailure(int64_t timeout_ns, Status* failure);
  const Alive& alive() const { return alive_; }
  int version() const { return api_.version; }

  // Aborts all communicators, each on a separate thread. The wait for the threads is bounded,
  // because a device may hang. Idempotent.
  void Abort();
  // Waits at most `finalize_ns` until peers have received everything, then aborts. No call may
  // begin after this. Idempotent.
  void Close(int64_t finalize_ns);

 private:
  // State that detached threads may still use after this object is gone.
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

// Returns CUDA's implementation of Devices. Tests link another one.
nccl::Devices NcclDevices();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_COMMUNICATORS_H_
