// Site: a call site of an executable.
#include "ffi/site.h"

#include <atomic>

#include "core/runs/runs.h"

namespace ep_runtime {
namespace {

std::atomic<uint64_t> last_site{0};

}  // namespace

xla::ffi::TypeId SiteState::id = {};
const XLA_FFI_TypeInfo SiteState::info = xla::ffi::MakeTypeInfo<SiteState>();

Site::Site(const SiteKind& kind)
    : id_(++last_site),
      name_(ThisProcessRuns().site_names.Next(kind)),
      born_(ThisProcessRuns().launches.Now()) {}

Site::Turn Site::Next(uint64_t run, int32_t device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [calls, is_new] = calls_.Add(run);
  if (is_new) calls.launch = ThisProcessRuns().launches.NumberOf(run, name_.name, born_);
  return {calls.launch, calls.of_device[device]++};
}

}  // namespace ep_runtime
