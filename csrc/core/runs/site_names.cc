// SiteNames: names of call sites.
#include "core/runs/site_names.h"

namespace ep_runtime {

SiteNames::Name SiteNames::Next(const SiteKind& kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t ordinal = counts_[kind]++;
  uint64_t name = Mixed(0, static_cast<uint64_t>(kind.op));
  for (uint64_t part : {kind.layer_id, kind.fingerprint, uint64_t{kind.handle}}) {
    name = Mixed(name, part);
  }
  name = Mixed(name, ordinal);
  names_.insert(name);
  return {name, ordinal};
}

bool SiteNames::Contains(uint64_t name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return names_.count(name) > 0;
}

}  // namespace ep_runtime
