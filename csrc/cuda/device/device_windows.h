// DeviceWindows: maps a group's windows.
#ifndef EP_RUNTIME_CUDA_DEVICE_DEVICE_WINDOWS_H_
#define EP_RUNTIME_CUDA_DEVICE_DEVICE_WINDOWS_H_

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "cuda/device/driver.h"

namespace ep_runtime {
namespace cuda {

// A group's windows in this process's address space. The window of world rank r begins at base + r
// * stride, for every device of the process. The daemon owns the memory, which outlives the
// mapping.
class DeviceWindows {
 public:
  DeviceWindows() = default;
  ~DeviceWindows() { Unmap(); }
  DeviceWindows(const DeviceWindows&) = delete;
  DeviceWindows& operator=(const DeviceWindows&) = delete;

  // Maps the windows that the daemon exported, for `devices` to read and write. `fds` has one fd
  // per world rank, -1 for a rank of another node. The caller may close the fds afterwards.
  Status Map(const std::vector<int>& fds, int64_t window_bytes, const std::vector<int>& devices);
  // Call this once no kernel accesses the windows.
  void Unmap();

  uint8_t* window(int64_t world_rank) const {
    return reinterpret_cast<uint8_t*>(base_) + world_rank * stride_;
  }
  int64_t stride() const { return stride_; }
  // Returns the first world rank whose window is on this node.
  int64_t first_rank() const { return mapped_.empty() ? 0 : mapped_.front(); }

 private:
  Status Import(int fd, int64_t world_rank);
  // Gives `access` to the windows of world ranks [first, end).
  Status SetAccess(int64_t first, int64_t end, const std::vector<CUmemAccessDesc>& access);

  const Driver* driver_ = nullptr;
  CUdeviceptr base_ = 0;
  int64_t stride_ = 0;
  int64_t reserved_bytes_ = 0;
  std::vector<int64_t> mapped_;  // world ranks whose windows are mapped
};

// Computes the bytes that the daemon allocates for a window: whole pages of the device.
Status AllocationBytes(const Driver& driver, int64_t window_bytes, int device, int64_t* bytes);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_DEVICE_WINDOWS_H_
