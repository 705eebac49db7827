// Errors for a layer id without an open group, with the same texts for every transport.
#ifndef EP_RUNTIME_CORE_GROUPS_STALE_H_
#define EP_RUNTIME_CORE_GROUPS_STALE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "core/base/status.h"

namespace ep_runtime {

// Returns an error with `message`, and the layer, group and generation as its fields.
inline Error StaleLayer(std::string message, const std::string& layer, const std::string& group,
                        uint64_t generation) {
  return Stale(std::move(message))
      .With("layer", layer)
      .With("group", group)
      .With("generation", static_cast<int64_t>(generation));
}

inline Error UnknownLayer(uint64_t layer_id) {
  return Stale("layer id " + std::to_string(layer_id) +
               " is not registered in this process; create its group and register it first")
      .With("layer_id", static_cast<int64_t>(layer_id));
}

inline Error ClosedLayer(const std::string& layer, const std::string& group, uint64_t generation) {
  return StaleLayer("layer " + layer + ": group " + group + " generation " +
                        std::to_string(generation) + " is closed",
                    layer, group, generation);
}

inline Error OtherLayer(const std::string& layer, const std::string& group, uint64_t generation,
                        uint64_t compiled_for, uint64_t fingerprint) {
  return StaleLayer("layer " + layer + ": the program was compiled for fingerprint " +
                        std::to_string(compiled_for) + ", the layer of generation " +
                        std::to_string(generation) + " has " + std::to_string(fingerprint) +
                        "; trace it again",
                    layer, group, generation);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_GROUPS_STALE_H_
