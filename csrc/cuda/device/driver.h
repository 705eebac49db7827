// Functions of the CUDA driver, looked up by name: the library also loads without a driver, and
// build machines have no driver library to link.
#ifndef EP_RUNTIME_CUDA_DEVICE_DRIVER_H_
#define EP_RUNTIME_CUDA_DEVICE_DRIVER_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include "core/base/status.h"

namespace ep_runtime {
namespace cuda {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) get_granularity;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemRelease) release;
  decltype(&cuMemGetAllocationPropertiesFromHandle) get_properties;
  decltype(&cuGetErrorString) get_error_string;
};

// Loads the functions once. Fails if no driver is installed, or if the driver lacks virtual
// memory management.
Status LoadDriver(const Driver** driver);

// Counts the GPUs this process sees. If the driver is too old, the error names its version and the
// version that is needed.
Status CountDevices(int* count);

// Returns success, or an error with the call's name and CUDA's error text.
Status Check(cudaError_t error, const char* call);
Status Check(const Driver& driver, CUresult result, const char* call);

#define EP_RETURN_IF_CUDA(expr) EP_RETURN_IF_ERROR(::ep_runtime::cuda::Check((expr), #expr))
#define EP_RETURN_IF_DRIVER(driver, expr) \
  EP_RETURN_IF_ERROR(::ep_runtime::cuda::Check((driver), (expr), #expr))

// Makes `device` current for as long as this object lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_DRIVER_H_
