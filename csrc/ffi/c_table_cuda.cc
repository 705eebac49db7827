// The table of the CUDA library.

#include <cuda_runtime.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device/device_group.h"
#include "cuda/device/driver.h"
#include "cuda/device/group_device.h"
#include "ffi/c_table.h"

namespace ep_runtime {
namespace {

int64_t EpWindowBytes(const EpGroupOptions* options) {
  return cuda::FlagLayout(ToSizes(*options)).window_bytes;
}

}  // namespace

Status OpenGroup(const EpGroupOptions& options, int board_fd, const std::vector<int>& window_fds,
                 std::shared_ptr<Group>* out) {
  if (options.local_devices == nullptr) return InvalidArgument("local_devices is missing");
  std::unique_ptr<GroupOptions> made;
  EP_RETURN_IF_ERROR(ToOptions(options, &made));
  made->window_bytes = EpWindowBytes(&options);
  if (static_cast<int64_t>(window_fds.size()) != options.world_size) {
    return InvalidArgument("window_fds must hold one fd per world rank, " +
                           std::to_string(options.world_size) + ", got " +
                           std::to_string(window_fds.size()));
  }
  std::shared_ptr<Group> group;
  EP_RETURN_IF_ERROR(Group::Open(std::move(*made), board_fd, /*window_fds=*/{}, &group));
  const std::vector<int> devices(options.local_devices,
                                 options.local_devices + options.num_local_ranks);
  std::unique_ptr<cuda::CudaGroup> device;
  EP_RETURN_IF_ERROR(cuda::CudaGroup::Open(group.get(), window_fds, devices, &device));
  group->Attach(std::move(device));
  *out = std::move(group);
  return Status();
}

namespace {

int64_t EpNumDevices(EpText error) {
  int count = 0;
  const Status status = cuda::CountDevices(&count);
  return status.ok() ? count : Fail(status, error);
}

// Writes a UUID in NVML's form: "GPU-" and the UUID's groups.
int64_t EpDeviceUuid(int32_t device, EpText text) {
  cudaDeviceProp properties;
  const Status status =
      cuda::Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  if (!status.ok()) return Fail(status, text);
  std::string uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    char byte[3];
    std::snprintf(byte, sizeof(byte), "%02x", static_cast<uint8_t>(properties.uuid.bytes[i]));
    uuid += byte;
  }
  return Say(uuid, text);
}

int64_t EpReaches(int32_t device, int32_t peer, EpText text) {
  if (device == peer) return 1;
  int reaches = 0;
  const Status status =
      cuda::Check(cudaDeviceCanAccessPeer(&reaches, device, peer), "cudaDeviceCanAccessPeer");
  return status.ok() ? reaches : Fail(status, text);
}

}  // namespace
}  // namespace ep_runtime

extern "C" __attribute__((visibility("default"))) const void* EpRuntimeTable() {
  using namespace ep_runtime;  // NOLINT: the table's fields are all from there
  static const EpTable table = {
      kTableAbi,
      sizeof(EpTable),
      EP_RUNTIME_VERSION,
      kTargets,
      kNumTargets,
      /*state_type_id=*/nullptr,
      /*state_type_info=*/nullptr,
      EpOpenGroup,
      EpAddLayers,
      EpRemoveLayers,
      EpCloseGroup,
      EpCheckGroup,
      EpFillStaging,
      EpWindowBytes,
      EpControlBytes,
      EpStructs,
      /*use_row_ops=*/nullptr,
      EpNumDevices,
      EpDeviceUuid,
      EpReaches,
      EP_RUNTIME_CUDA_ARCHITECTURES,
  };
  return &table;
}
