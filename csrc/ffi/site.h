#ifndef EP_RUNTIME_FFI_SITE_H_
#define EP_RUNTIME_FFI_SITE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/meeting.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

// One call site of one executable: XLA instantiates each once, shared by all devices, so its
// number and the run's name a call exactly within a process.
class Site {
 public:
  Site();
  // The key of the next call of this site on `world_rank` in that run. Loops run a site many
  // times in one run, in the same order on every rank.
  CallKey NextKey(int64_t run, int64_t world_rank);

 private:
  // More runs than XLA keeps in flight at once (32 per device on the oldest supported jaxlib).
  static constexpr size_t kMaxRuns = 4096;

  const uint64_t id_;
  std::mutex mutex_;
  std::unordered_map<int64_t, std::vector<uint32_t>> calls_;  // run -> calls per world rank
  std::deque<int64_t> order_;
};

// What XLA keeps for a call site. Calls copy the pointer: they may outlive the executable.
struct SiteState {
  static xla::ffi::TypeId id;
  static const XLA_FFI_TypeInfo info;
  std::shared_ptr<Site> site = std::make_shared<Site>();
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_SITE_H_
