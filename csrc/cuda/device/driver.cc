// Loads functions of the CUDA driver by name.
#include "cuda/device/driver.h"

#include <mutex>

namespace ep_runtime {
namespace cuda {
namespace {

// The driver version whose function declarations this code is compiled with.
constexpr unsigned int kDriverVersion = 12000;

template <typename Function>
Status Find(const char* name, Function* function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  EP_RETURN_IF_CUDA(
      cudaGetDriverEntryPointByVersion(name, &entry, kDriverVersion, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    return Internal(std::string("the CUDA driver has no ") + name +
                    "; it must be of CUDA 12 or newer");
  }
  *function = reinterpret_cast<Function>(entry);
  return Status();
}

Status FindAll(Driver* driver) {
  EP_RETURN_IF_ERROR(Find("cuMemGetAllocationGranularity", &driver->get_granularity));
  EP_RETURN_IF_ERROR(Find("cuMemImportFromShareableHandle", &driver->import_handle));
  EP_RETURN_IF_ERROR(Find("cuMemAddressReserve", &driver->reserve));
  EP_RETURN_IF_ERROR(Find("cuMemAddressFree", &driver->free_address));
  EP_RETURN_IF_ERROR(Find("cuMemMap", &driver->map));
  EP_RETURN_IF_ERROR(Find("cuMemUnmap", &driver->unmap));
  EP_RETURN_IF_ERROR(Find("cuMemSetAccess", &driver->set_access));
  EP_RETURN_IF_ERROR(Find("cuMemRelease", &driver->release));
  EP_RETURN_IF_ERROR(Find("cuMemGetAllocationPropertiesFromHandle", &driver->get_properties));
  return Find("cuGetErrorString", &driver->get_error_string);
}

}  // namespace

Status LoadDriver(const Driver** driver) {
  static std::mutex mutex;
  static Driver loaded;
  static bool done = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (!done) EP_RETURN_IF_ERROR(FindAll(&loaded));
  done = true;
  *driver = &loaded;
  return Status();
}

Status CountDevices(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error != cudaErrorInsufficientDriver) return Check(error, "cudaGetDeviceCount");
  int version = 0;  // stays 0 without a driver
  EP_RETURN_IF_CUDA(cudaDriverGetVersion(&version));
  const std::string found = "a driver for CUDA " + std::to_string(version / 1000) + "." +
                            std::to_string(version % 1000 / 10);
  return Error(Code::kFailedPrecondition, "RuntimeUnavailableError")
      .Says("the NVIDIA driver must support CUDA " + std::to_string(CUDART_VERSION / 1000) +
            ", with which this package was built, got " + (version == 0 ? "no driver" : found) +
            "; install a newer driver, or build with an older nvcc");
}

Status Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return Status();
  return Internal(std::string("CUDA: ") + call + ": " + cudaGetErrorString(error))
      .With("cuda_error", int64_t{error});
}

Status Check(const Driver& driver, CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return Status();
  const char* text = nullptr;
  driver.get_error_string(result, &text);
  return Internal(std::string("CUDA driver: ") + call + ": " + (text ? text : "unknown error"))
      .With("cuda_error", int64_t{result});
}

}  // namespace cuda
}  // namespace ep_runtime
