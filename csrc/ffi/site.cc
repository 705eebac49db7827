#include "ffi/site.h"

#include <atomic>

namespace ep_runtime {
namespace {

std::atomic<uint64_t> last_site{0};

}  // namespace

xla::ffi::TypeId SiteState::id = {};
const XLA_FFI_TypeInfo SiteState::info = xla::ffi::MakeTypeInfo<SiteState>();

Site::Site() : id_(++last_site) {}

CallKey Site::NextKey(uint64_t run, int32_t device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = calls_.try_emplace(run);
  if (is_new) {
    order_.push_back(run);
    if (order_.size() > kMaxRuns) {
      calls_.erase(order_.front());
      order_.pop_front();
    }
  }
  const uint64_t number = found->second[device]++;
  return {id_ << 32 | number, run};
}

}  // namespace ep_runtime
