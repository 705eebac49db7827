// CudaGroup: an open group's state on its GPUs.
#ifndef EP_RUNTIME_CUDA_DEVICE_GROUP_DEVICE_H_
#define EP_RUNTIME_CUDA_DEVICE_GROUP_DEVICE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/groups/group.h"
#include "core/runs/run_starts.h"
#include "cuda/device/device_board.h"
#include "cuda/device/device_group.h"
#include "cuda/device/device_windows.h"
#include "cuda/device/rank_memory.h"
#include "cuda/device/side_streams.h"

namespace ep_runtime {
namespace cuda {

// One world rank that this process drives.
struct LocalRank : RankMemory {
  int64_t world_rank;
  int device;         // CUDA ordinal
  SideStreams* side;  // null: exchanges overlap nothing
};

struct ExchangeBlocks {
  int32_t push;  // blocks of dispatch that send
  int32_t place;
  int32_t reduce;  // blocks of combine that sum rows for peers
  int32_t sum;
};

struct LaunchBlocks {
  int32_t prepare;
  ExchangeBlocks beside;   // blocks of exchanges that overlap other kernels
  ExchangeBlocks alone;    // blocks of a block call's exchanges that overlap nothing
  ExchangeBlocks combine;  // blocks of combine and dispatch's backward as separate calls

  // Blocks of an exchange as a separate call. With few tokens an exchange ends so soon that other
  // kernels hardly wait for its SMs.
  const ExchangeBlocks& OfTokens(int64_t tokens, const ExchangeBlocks& of_many) const {
    constexpr int64_t kFew = 256;
    return tokens <= kFew ? alone : of_many;
  }
};

// The NVIDIA side of an open group: windows mapped for every device of the process, a descriptor
// per local rank, and the errors that the devices reported.
class CudaGroup : public GroupDevice {
 public:
  // `devices[i]` drives the group's i-th local rank. Zeroes the flags of the local windows: the
  // caller reports the group attached only after this returns.
  static Status Open(const Group* group, const std::vector<int>& window_fds,
                     const std::vector<int>& devices, std::unique_ptr<CudaGroup>* out);
  ~CudaGroup() override { Close(); }

  // Returns the local rank of the device, or null.
  const LocalRank* OfDevice(int device) const;
  const LaunchBlocks& blocks() const { return blocks_; }

  // Decides whether `run` starts. RunStarts explains why its first call decides.
  Status Decide(uint64_t run, const std::string& layer_name, OpCode op);

  void Close() override;
  std::string TakeError() override;
  void FillStaging(int byte) override;

 private:
  explicit CudaGroup(const Group* group) : group_(group) {}

  Status CheckLimits(const std::vector<int>& devices) const;
  Status CountSms(const std::vector<int>& devices, int32_t* sms) const;
  Status ChooseBlocks(const std::vector<int>& devices);
  Status OpenRank(int64_t world_rank, int device);
  Status OpenSide(LocalRank* rank);
  Status DescribeRank(const LocalRank& rank, DeviceGroup* group);
  Status FirstFailure() const;
  Status ErrorOf(const FailRecord& record) const;
  Status ErrorOf(const BadIndex& record) const;
  Status ReplayError(const FailRecord& record) const;

  const Group* group_;  // owns this object
  DeviceWindows windows_;
  DeviceBoard board_;
  std::vector<LocalRank> ranks_;
  std::vector<std::unique_ptr<SideStreams>> sides_;
  LaunchBlocks blocks_{};
  int64_t overlap_ = 1;  // 0: exchanges overlap nothing
  int64_t num_sms_ =
      0;  // setting: blocks of an exchange's kernel in total; 0: the measured defaults
  bool closed_ = false;

  std::mutex mutex_;
  bool told_ = false;  // true: TakeError has returned the failure
  RunStarts starts_;
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_GROUP_DEVICE_H_
