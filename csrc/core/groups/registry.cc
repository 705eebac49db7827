// Registry: open groups that use windows.
#include "core/groups/registry.h"

#include "core/base/per_process.h"
#include "core/memory/board.h"

namespace ep_runtime {

Status Registry::AddLayers(int64_t group_id, const std::vector<LayerEntry>& layers) {
  for (const LayerEntry& layer : layers) {
    if (layer.handle_base + layer.in_flight <= kMaxHandles) continue;
    return InvalidArgument("layer " + layer.name + ": handles must lie below " +
                           std::to_string(kMaxHandles) + ", got " +
                           std::to_string(layer.handle_base + layer.in_flight));
  }
  return LayerTable::AddLayers(group_id, layers);
}

Process& ThisProcess() { return OfThisProcess<Process>(); }

}  // namespace ep_runtime
