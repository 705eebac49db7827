#ifndef EP_RUNTIME_CORE_BASE_SETTINGS_H_
#define EP_RUNTIME_CORE_BASE_SETTINGS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "core/base/status.h"

namespace ep_runtime {

// A group's settings by the names that `GroupSpec` in ep_runtime/specs.py gives them, so that one
// more needs nothing but its reader here. Seconds ("op_timeout_s") are whole nanoseconds
// ("op_timeout_ns"), for no locale of the process changes how those are written.
class Settings {
 public:
  // A line for each, "name=value".
  explicit Settings(std::string lines) : lines_("\n" + std::move(lines) + "\n") {}

  // Each is an error where nobody gave that setting.
  Status Read(const char* name, std::string* value) const;
  Status Read(const char* name, int64_t* value) const;

  // Equal where every setting is.
  const std::string& lines() const { return lines_; }

 private:
  std::string lines_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_SETTINGS_H_
