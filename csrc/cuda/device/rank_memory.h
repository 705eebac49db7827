// Memory of a rank on its device, without the windows. It is never freed, because a CUDA graph that
// is replayed after the group closed reads the descriptor and writes the record.
#ifndef EP_RUNTIME_CUDA_DEVICE_RANK_MEMORY_H_
#define EP_RUNTIME_CUDA_DEVICE_RANK_MEMORY_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/groups/group.h"
#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

struct RankMemory {
  DeviceGroup* group;    // device
  int32_t* scratch;      // device, ScratchBytes
  HandleTotals* totals;  // device, [kMaxHandles]
  uint8_t* tally;        // device, laid out by TallyLayout
  FailRecord* record;    // host memory that the device writes, like the next two
  DeviceVerdict* verdict;
  BadIndex* bad_index;
};

// Settings of a group that decide how its calls are launched.
struct LaunchSettings {
  int64_t num_sms;
  int64_t overlap;
};

// The rank memories of this process. A group that forms again with unchanged settings gets its old
// addresses: programs compiled and graphs recorded for it work with the new generation. A group
// with changed settings gets other memory, so that an old program finds its own group closed.
class RankMemories {
 public:
  // Reuses or allocates memory of `world_rank` on the current device. The memory is all zeros, and
  // no kernel uses it.
  Status Take(const GroupOptions& options, const LaunchSettings& launch, int64_t world_rank,
              int device, RankMemory* out);
  // Returns the memory of a closed group.
  void GiveBack(const std::string& group, const RankMemory& memory);
  // Returns true once after a replayed graph called a closed group named `group`; `out` describes
  // the call.
  bool TakeReplay(const std::string& group, FailRecord* out);

 private:
  struct Idle {
    std::string group;  // name of the group that had the memory
    std::string key;
    RankMemory memory;
  };

  std::mutex mutex_;
  std::map<const DeviceGroup*, std::string> keys_;  // keys of memory in use
  std::vector<Idle> idle_;
};

RankMemories& ProcessRankMemories();

// Whether the device has written the record.
bool IsWritten(const uint32_t& valid);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_RANK_MEMORY_H_
