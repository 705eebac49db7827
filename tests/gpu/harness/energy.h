// Energy that GPUs draw.
#ifndef EP_RUNTIME_TESTS_GPU_ENERGY_H_
#define EP_RUNTIME_TESTS_GPU_ENERGY_H_

#include <dlfcn.h>

namespace gpu_test {

// Energy that the first GPUs have drawn so far, in mJ by NVML's counters; 0 without counters.
inline double DrawnMillijoules(int gpus) {
  static void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (nvml == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
  const auto find =
      reinterpret_cast<int (*)(unsigned, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"));
  const auto read = reinterpret_cast<int (*)(void*, unsigned long long*)>(
      dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption"));
  double sum = 0;
  if (init() != 0) return 0;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    void* device = nullptr;
    unsigned long long drawn = 0;
    if (find(gpu, &device) != 0 || read(device, &drawn) != 0) return 0;
    sum += static_cast<double>(drawn);
  }
  return sum;
}

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_ENERGY_H_
