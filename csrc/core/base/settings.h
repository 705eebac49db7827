// Settings: a group's settings by name.
#ifndef EP_RUNTIME_CORE_BASE_SETTINGS_H_
#define EP_RUNTIME_CORE_BASE_SETTINGS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "core/base/status.h"

namespace ep_runtime {

// A group's settings by the names of `GroupSpec` in ep_runtime/specs.py, so that a new setting
// needs no other native code than a call of Read. Seconds ("op_timeout_s") arrive as whole
// nanoseconds ("op_timeout_ns"), because a process's locale cannot change how integers are written.
class Settings {
 public:
  // `lines` has one line "name=value" for each setting.
  explicit Settings(std::string lines) : lines_("\n" + std::move(lines) + "\n") {}

  // Each Read fails if the group has no such setting.
  Status Read(const char* name, std::string* value) const;
  Status Read(const char* name, int64_t* value) const;

  // All settings as text, equal for two groups if all their settings are equal.
  const std::string& lines() const { return lines_; }

 private:
  std::string lines_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_SETTINGS_H_
