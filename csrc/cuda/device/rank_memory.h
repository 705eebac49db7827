// What a rank has on its device beside the windows. None of it is ever freed: a CUDA graph that is
// replayed after the group closed reads the descriptor and writes the record.
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
  uint8_t* tally;        // device, as TallyLayout has it
  FailRecord* record;    // host memory that the device writes, like those below
  DeviceVerdict* verdict;
  BadIndex* bad_index;
};

// Settings of a group that decide how its calls are launched.
struct LaunchSettings {
  int64_t num_sms;
  int64_t overlap;
};

// Of this process. A group that is made again, equal in all that a graph holds of it, takes the
// addresses that it had: programs that were compiled and recorded for it go on with the new one.
// Other groups leave theirs behind, so that an old program finds its own group closed.
class RankMemories {
 public:
  // Of `world_rank` on the current device; all zeros, and no kernel uses it any more.
  Status Take(const GroupOptions& options, const LaunchSettings& launch, int64_t world_rank,
              int device, RankMemory* out);
  // Of a group that closed.
  void GiveBack(const std::string& group, const RankMemory& memory);
  // True once after a closed group of that name was called by a replayed graph: what it was.
  bool TakeReplay(const std::string& group, FailRecord* out);

 private:
  struct Idle {
    std::string group;  // its name
    std::string key;
    RankMemory memory;
  };

  std::mutex mutex_;
  std::map<const DeviceGroup*, std::string> keys_;  // of memory in use
  std::vector<Idle> idle_;
};

RankMemories& ProcessRankMemories();

// Of a record that a device writes.
bool IsWritten(const uint32_t& valid);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_RANK_MEMORY_H_
