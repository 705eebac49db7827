// RecentMap: a map that forgets its oldest entries.
#ifndef EP_RUNTIME_CORE_BASE_RECENT_MAP_H_
#define EP_RUNTIME_CORE_BASE_RECENT_MAP_H_

#include <cstddef>
#include <deque>
#include <map>
#include <utility>

namespace ep_runtime {

// A map of at most `kMost` entries. When it is full, a new entry replaces the oldest one.
template <typename Key, typename Value, size_t kMost>
class RecentMap {
 public:
  // Returns the value of `key`, constructed from `args` if the key is new, and whether the key is
  // new.
  template <typename... Args>
  std::pair<Value&, bool> Add(const Key& key, Args&&... args) {
    auto [found, is_new] = entries_.try_emplace(key, std::forward<Args>(args)...);
    if (is_new) {
      order_.push_back(key);
      if (order_.size() > kMost) {
        entries_.erase(order_.front());
        order_.pop_front();
      }
    }
    return {found->second, is_new};
  }
  // Returns the value of `key`, or null if `key` was never added or has been forgotten.
  const Value* Find(const Key& key) const {
    auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }
  bool empty() const { return entries_.empty(); }

 private:
  std::map<Key, Value> entries_;
  std::deque<Key> order_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_RECENT_MAP_H_
