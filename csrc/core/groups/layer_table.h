// LayerTable: open groups and their layers.
#ifndef EP_RUNTIME_CORE_GROUPS_LAYER_TABLE_H_
#define EP_RUNTIME_CORE_GROUPS_LAYER_TABLE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/groups/stale.h"

namespace ep_runtime {

// Open groups by number and their layers by id. Programs carry layer ids only, and calls resolve
// the ids in this table. A `LayerOf` has id, name and fingerprint; a `GroupOf` has options() with
// name and generation.
template <typename LayerOf, typename GroupOf>
class LayerTable {
 public:
  int64_t AddGroup(std::shared_ptr<GroupOf> group) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    groups_.emplace(++last_group_id_, std::move(group));
    return last_group_id_;
  }

  // Returns the group, or null if it is not open.
  std::shared_ptr<GroupOf> FindGroup(int64_t id) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = groups_.find(id);
    return found == groups_.end() ? nullptr : found->second;
  }

  // Removes and returns the group, or returns null. Its layers stay in the table, so that errors of
  // their calls can name the closed group.
  std::shared_ptr<GroupOf> RemoveGroup(int64_t id) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    auto found = groups_.find(id);
    if (found == groups_.end()) return nullptr;
    std::shared_ptr<GroupOf> group = std::move(found->second);
    groups_.erase(found);
    for (auto& [layer_id, registered] : layers_) {
      if (registered.group_id == id) registered.group = nullptr;
    }
    return group;
  }

  // Adds all layers, or none if one of the ids belongs to another open group.
  Status AddLayers(int64_t group_id, const std::vector<LayerOf>& layers) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    auto found = groups_.find(group_id);
    if (found == groups_.end()) {
      return Stale("no open group has the number " + std::to_string(group_id));
    }
    for (const LayerOf& layer : layers) {
      auto other = layers_.find(layer.id);
      if (other != layers_.end() && other->second.group != nullptr &&
          other->second.group_id != group_id) {
        return InvalidArgument("layer " + layer.name + ": its id is taken by layer " +
                               other->second.layer.name + " of group " + other->second.group_name);
      }
    }
    const auto& options = found->second->options();
    for (const LayerOf& layer : layers) {
      layers_[layer.id] =
          Registered{layer, group_id, found->second, options.name, options.generation};
    }
    return Status();
  }

  void RemoveLayers(int64_t group_id, const std::vector<uint64_t>& ids) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    for (uint64_t id : ids) {
      auto found = layers_.find(id);
      if (found != layers_.end() && found->second.group_id == group_id) {
        found->second.group = nullptr;
      }
    }
  }

  // Returns the name of a layer, open or closed, or its id if the layer is unknown.
  std::string LayerName(uint64_t layer_id) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = layers_.find(layer_id);
    return found == layers_.end() ? std::to_string(layer_id) : found->second.layer.name;
  }

  // Finds the open layer and its group. Otherwise returns a StaleHandleError with the reason.
  Status Resolve(uint64_t layer_id, uint64_t fingerprint, LayerOf* layer,
                 std::shared_ptr<GroupOf>* group) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = layers_.find(layer_id);
    if (found == layers_.end()) return UnknownLayer(layer_id);
    const Registered& registered = found->second;
    if (registered.group == nullptr) {
      return ClosedLayer(registered.layer.name, registered.group_name, registered.generation);
    }
    if (registered.layer.fingerprint != fingerprint) {
      return OtherLayer(registered.layer.name, registered.group_name, registered.generation,
                        fingerprint, registered.layer.fingerprint);
    }
    *layer = registered.layer;
    *group = registered.group;
    return Status();
  }

 private:
  struct Registered {
    LayerOf layer;
    int64_t group_id;
    std::shared_ptr<GroupOf> group;  // null once closed; errors still use the other fields
    std::string group_name;
    uint64_t generation;
  };

  mutable std::shared_mutex mutex_;
  int64_t last_group_id_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<GroupOf>> groups_;
  std::unordered_map<uint64_t, Registered> layers_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_LAYER_TABLE_H_
