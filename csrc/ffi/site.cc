#include "ffi/site.h"

#include <atomic>

namespace ep_runtime {
namespace {

std::atomic<uint64_t> last_site{0};

}  // namespace

xla::ffi::TypeId SiteState::id = {};
const XLA_FFI_TypeInfo SiteState::info = xla::ffi::MakeTypeInfo<SiteState>();

Site::Site() : id_(++last_site) {}

CallKey Site::NextKey(int64_t run, int64_t world_rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = calls_.try_emplace(run);
  if (is_new) {
    order_.push_back(run);
    if (order_.size() > kMaxRuns) {
      calls_.erase(order_.front());
      order_.pop_front();
    }
  }
  std::vector<uint32_t>& calls = found->second;
  if (static_cast<int64_t>(calls.size()) <= world_rank) calls.resize(world_rank + 1, 0);
  const uint64_t number = calls[world_rank]++;
  return {id_ << 32 | number, static_cast<uint64_t>(run)};
}

}  // namespace ep_runtime
