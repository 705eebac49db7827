#ifndef EP_RUNTIME_CORE_GROUPS_REGISTRY_H_
#define EP_RUNTIME_CORE_GROUPS_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/call_threads.h"
#include "core/groups/group.h"

namespace ep_runtime {

struct LayerEntry {
  uint64_t id = 0;
  std::string name;
  uint64_t fingerprint = 0;
  int64_t top_k = 0;
  int64_t alignment = 1;
  int64_t in_flight = 1;
  uint32_t handle_base = 0;  // index of its handle 0 on the board
};

// Open groups and layers of this process. Programs carry layer ids only; calls resolve them here.
class Registry {
 public:
  int64_t AddGroup(std::shared_ptr<Group> group);
  std::shared_ptr<Group> FindGroup(int64_t id) const;
  Status AddLayers(int64_t group_id, const std::vector<LayerEntry>& layers);
  void RemoveLayers(int64_t group_id, const std::vector<uint64_t>& ids);
  void RemoveGroup(int64_t group_id);

  // The name of a layer, also of one that was closed; its number where nobody knows it.
  std::string LayerName(uint64_t layer_id) const;
  // The open layer and its group, or the StaleHandleError that says why there is none.
  Status Resolve(uint64_t layer_id, uint64_t fingerprint, LayerEntry* layer,
                 std::shared_ptr<Group>* group) const;

 private:
  struct Registered {
    LayerEntry layer;
    int64_t group_id;
    std::shared_ptr<Group> group;  // null once closed; the rest stays, to name it in errors
    std::string group_name;
    uint64_t generation;
  };

  mutable std::shared_mutex mutex_;
  int64_t last_group_id_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<Group>> groups_;
  std::unordered_map<uint64_t, Registered> layers_;
};

struct Process {
  Registry registry;
  CallThreads threads;
};
Process& ThisProcess();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_REGISTRY_H_
