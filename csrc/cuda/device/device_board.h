// DeviceBoard: maps the board into the devices' address space.
#ifndef EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_
#define EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_

#include <cstdint>
#include <vector>

#include "core/groups/group.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// A group's board in the address space of this process's devices.
class DeviceBoard {
 public:
  // Registers the header, and with `tell_progress` also the records that ranks write.
  Status Map(const Group& group);
  // Call this once no kernel accesses the board.
  void Unmap();

  // Returns the devices' address of the header's word.
  const uint64_t* poison_generation() const;
  // Fills the pointers that the rank's kernels write to, except `totals` and the tally's `sums`.
  // All are null without `tell_progress`.
  Status OpenRank(const Group& group, int64_t world_rank, Progress* out);

 private:
  Status OpenTally(const Group& group, int64_t seat, DeviceTally* out);
  // Registers whole pages. `device` gets the devices' address of `start`.
  Status Register(const void* start, int64_t bytes, uint8_t** device);

  std::vector<void*> registered_;
  uint8_t* board_ = nullptr;  // the board's address on the devices
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_DEVICE_BOARD_H_
