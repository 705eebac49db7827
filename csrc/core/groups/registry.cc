#include "core/groups/registry.h"

#include <mutex>

#include "core/base/per_process.h"
#include "core/groups/stale.h"

namespace ep_runtime {

int64_t Registry::AddGroup(std::shared_ptr<Group> group) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  groups_.emplace(++last_group_id_, std::move(group));
  return last_group_id_;
}

std::shared_ptr<Group> Registry::FindGroup(int64_t id) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

Status Registry::AddLayers(int64_t group_id, const std::vector<LayerEntry>& layers) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = groups_.find(group_id);
  if (found == groups_.end()) {
    return Stale("no open group has the number " + std::to_string(group_id));
  }
  for (const LayerEntry& layer : layers) {
    if (layer.handle_base + layer.in_flight > kMaxHandles) {
      return InvalidArgument("layer " + layer.name + ": handles must lie below " +
                             std::to_string(kMaxHandles) + ", got " +
                             std::to_string(layer.handle_base + layer.in_flight));
    }
    auto other = layers_.find(layer.id);
    if (other != layers_.end() && other->second.group != nullptr &&
        other->second.group_id != group_id) {
      return InvalidArgument("layer " + layer.name + ": its id is taken by layer " +
                             other->second.layer.name + " of group " + other->second.group_name);
    }
  }
  const GroupOptions& options = found->second->options();
  for (const LayerEntry& layer : layers) {
    layers_[layer.id] =
        Registered{layer, group_id, found->second, options.name, options.generation};
  }
  return Status();
}

void Registry::RemoveLayers(int64_t group_id, const std::vector<uint64_t>& ids) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  for (uint64_t id : ids) {
    auto found = layers_.find(id);
    if (found != layers_.end() && found->second.group_id == group_id) {
      found->second.group = nullptr;
    }
  }
}

void Registry::RemoveGroup(int64_t group_id) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  groups_.erase(group_id);
  for (auto& [id, registered] : layers_) {
    if (registered.group_id == group_id) registered.group = nullptr;
  }
}

std::string Registry::LayerName(uint64_t layer_id) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  auto found = layers_.find(layer_id);
  return found == layers_.end() ? std::to_string(layer_id) : found->second.layer.name;
}

Status Registry::Resolve(uint64_t layer_id, uint64_t fingerprint, LayerEntry* layer,
                         std::shared_ptr<Group>* group) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  auto found = layers_.find(layer_id);
  if (found == layers_.end()) {
    return UnknownLayer(layer_id);
  }
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

Process& ThisProcess() { return OfThisProcess<Process>(); }

}  // namespace ep_runtime
