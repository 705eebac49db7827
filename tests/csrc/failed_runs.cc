// Ends with 0 if a device sees an error of its process only after other processes can. If it saw
// the error earlier, it would leave its call, and they would find a peer that failed for no reason.
#include "core/runs/failed_runs.h"

#include <atomic>
#include <thread>

using namespace ep_runtime;

int main() {
  FailedRuns runs;
  const Launches launches;
  std::atomic<int> looks{0};
  std::atomic<bool> early{false}, published{false};
  std::thread device([&] {
    while (runs.Get(7, launches).ok()) ++looks;
    early = !published;
  });
  runs.Add(7, Status(Code::kAborted, "first"), [&] {
    for (const int before = looks; !early && looks < before + 1000;) std::this_thread::yield();
    published = true;
  });
  device.join();
  runs.Add(7, Status(Code::kAborted, "second"), [&] { early = true; });
  return early || runs.Get(7, launches).text() != "first";
}
