// Prints the CUDA library's answer when it counts the GPUs of this machine.
#include <cstdio>

#include "cuda/device/driver.h"

int main() {
  int count = 0;
  const ep_runtime::Status status = ep_runtime::cuda::CountDevices(&count);
  std::printf("%s\n", status.ok() ? "ok" : status.text().c_str());
  return 0;
}
