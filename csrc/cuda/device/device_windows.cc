// DeviceWindows: maps a group's windows.
#include "cuda/device/device_windows.h"

#include "core/memory/layout.h"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

}  // namespace

Status AllocationBytes(const Driver& driver, int64_t window_bytes, int device, int64_t* bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = kHandleType;
  size_t granularity = 0;
  // The daemon rounds to the same granularity. Larger pages need fewer translations.
  EP_RETURN_IF_DRIVER(driver, driver.get_granularity(&granularity, &properties,
                                                     CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  *bytes = AlignUp(window_bytes, static_cast<int64_t>(granularity));
  return Status();
}

Status DeviceWindows::Map(const std::vector<int>& fds, int64_t window_bytes,
                          const std::vector<int>& devices) {
  EP_RETURN_IF_ERROR(LoadDriver(&driver_));
  EP_RETURN_IF_ERROR(AllocationBytes(*driver_, window_bytes, devices[0], &stride_));
  const int64_t bytes = stride_ * static_cast<int64_t>(fds.size());
  EP_RETURN_IF_DRIVER(*driver_, driver_->reserve(&base_, bytes, 0, 0, 0));
  reserved_bytes_ = bytes;
  const auto ranks = static_cast<int64_t>(fds.size());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (fds[rank] >= 0) EP_RETURN_IF_ERROR(Import(fds[rank], rank));
  }
  std::vector<CUmemAccessDesc> access(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = devices[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  // Set access for each run of windows separately, because it cannot be set for addresses without a
  // mapping.
  for (int64_t first = 0, end = 0; first < ranks; first = end + 1) {
    for (end = first; end < ranks && fds[end] >= 0;) ++end;
    if (end > first) EP_RETURN_IF_ERROR(SetAccess(first, end, access));
  }
  return Status();
}

Status DeviceWindows::SetAccess(int64_t first, int64_t end,
                                const std::vector<CUmemAccessDesc>& access) {
  const CUresult result = driver_->set_access(base_ + first * stride_, (end - first) * stride_,
                                              access.data(), access.size());
  if (result == CUDA_SUCCESS) return Status();
  return Error(Code::kFailedPrecondition, "EpRuntimeError")
      .Says("these GPUs cannot map each other's memory (no NVLink or peer access between them): " +
            Check(*driver_, result, "cuMemSetAccess").text() +
            "; use transport=\"nccl\" or \"xla\"")
      .With("devices", static_cast<int64_t>(access.size()));
}

Status DeviceWindows::Import(int fd, int64_t world_rank) {
  CUmemGenericAllocationHandle memory = 0;
  EP_RETURN_IF_DRIVER(
      *driver_, driver_->import_handle(&memory, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                       kHandleType));
  const CUresult result = driver_->map(base_ + world_rank * stride_, stride_, 0, memory, 0);
  // The mapping keeps the memory from here on.
  driver_->release(memory);
  EP_RETURN_IF_ERROR(Check(*driver_, result, "cuMemMap of a window"));
  mapped_.push_back(world_rank);
  return Status();
}

void DeviceWindows::Unmap() {
  if (reserved_bytes_ == 0) return;
  for (int64_t rank : mapped_) driver_->unmap(base_ + rank * stride_, stride_);
  driver_->free_address(base_, reserved_bytes_);
  reserved_bytes_ = 0;
  mapped_.clear();
}

}  // namespace cuda
}  // namespace ep_runtime
