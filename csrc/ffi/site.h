// Site: a call site of an executable.
#ifndef EP_RUNTIME_FFI_SITE_H_
#define EP_RUNTIME_FFI_SITE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/base/recent_map.h"
#include "core/meeting/meeting.h"
#include "core/runs/launches.h"
#include "core/runs/site_names.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

// One call site of one executable. XLA instantiates each site once for all devices, so the site's
// number and the run identify a call within a process. Between processes the site's name identifies
// the site.
class Site {
 public:
  explicit Site(const SiteKind& kind);

  // One device's execution of this site.
  struct Turn {
    uint32_t launch;  // number of the executable's launch
    // How often this site ran before on the same device in the same run: loops run a site many
    // times, in the same order on every device. The count is by device instead of by rank, so that
    // two devices that claim one rank meet and get an error.
    uint32_t repetition;
  };
  Turn Next(uint64_t run, int32_t device);

  CallKey KeyHere(uint64_t run, const Turn& turn) const {
    return {id_ << 32 | turn.repetition, run};
  }
  CallKey KeyEverywhere(const Turn& turn) const {
    return {Mixed(name_.name, turn.repetition), turn.launch};
  }
  CallSite Named(const Turn& turn) const { return {name_.name, name_.ordinal, turn.repetition}; }

 private:
  // More runs than XLA keeps in flight at once (32 per device on the oldest supported jaxlib). An
  // executable never reuses a run's id.
  static constexpr size_t kMaxRuns = 4096;

  const uint64_t id_;
  const SiteNames::Name name_;
  const Launches::Moment born_;
  std::mutex mutex_;
  struct Calls {
    uint32_t launch;
    std::unordered_map<int32_t, uint32_t> of_device;
  };
  RecentMap<uint64_t, Calls, kMaxRuns> calls_;  // by XLA's id of the run
};

// XLA's state of a call site. Calls copy the pointer, because a call may outlive the executable.
struct SiteState {
  static xla::ffi::TypeId id;
  static const XLA_FFI_TypeInfo info;
  std::shared_ptr<Site> site;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_SITE_H_
