// Registry: open groups that use windows.
#ifndef EP_RUNTIME_CORE_GROUPS_REGISTRY_H_
#define EP_RUNTIME_CORE_GROUPS_REGISTRY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/call_threads.h"
#include "core/groups/group.h"
#include "core/groups/layer_table.h"

namespace ep_runtime {

struct LayerEntry {
  uint64_t id = 0;
  std::string name;
  uint64_t fingerprint = 0;
  int64_t top_k = 0;
  int64_t alignment = 1;
  int64_t in_flight = 1;
  uint32_t handle_base = 0;  // board index of the layer's handle 0
};

// Open groups of this process whose rows travel through windows, and their layers.
class Registry : public LayerTable<LayerEntry, Group> {
 public:
  // Like LayerTable::AddLayers, but also fails if the board has no room for a layer's handles.
  Status AddLayers(int64_t group_id, const std::vector<LayerEntry>& layers);
};

struct Process {
  Registry registry;
  CallThreads threads;
};
Process& ThisProcess();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_REGISTRY_H_
