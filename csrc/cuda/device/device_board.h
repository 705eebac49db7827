#ifndef EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_
#define EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_

#include <cstdint>
#include <vector>

#include "core/groups/group.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// The group's board as kernels of this process see it.
class DeviceBoard {
 public:
  // Registers the header, and with `tell_progress` also the records that ranks write.
  Status Map(const Group& group);
  // No kernel looks at the board any more.
  void Unmap();

  // The header's word, in the devices' addresses.
  const uint64_t* poison_generation() const;
  // What that rank writes to, but `totals` and the tally's `sums`; all null without
  // `tell_progress`.
  Status OpenRank(const Group& group, int64_t world_rank, Progress* out);

 private:
  // Whole pages; `device` gets the devices' address of `start`.
  Status OpenTally(const Group& group, int64_t world_rank, DeviceTally* out);
  Status Register(const void* start, int64_t bytes, uint8_t** device);

  std::vector<void*> registered_;
  uint8_t* board_ = nullptr;  // in the devices' addresses
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_
