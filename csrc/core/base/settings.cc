// Settings: parses a group's settings.
#include "core/base/settings.h"

#include <charconv>
#include <string>
#include <system_error>

namespace ep_runtime {

Status Settings::Read(const char* name, std::string* value) const {
  const std::string key = "\n" + std::string(name) + "=";
  const size_t found = lines_.find(key);
  if (found == std::string::npos) {
    return InvalidArgument("the group's settings have no " + std::string(name));
  }
  const size_t start = found + key.size();
  *value = lines_.substr(start, lines_.find('\n', start) - start);
  return Status();
}

Status Settings::Read(const char* name, int64_t* value) const {
  std::string text;
  EP_RETURN_IF_ERROR(Read(name, &text));
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, *value);
  if (read.ec == std::errc() && read.ptr == end) return Status();
  return InvalidArgument(std::string(name) + " must be an integer, got '" + text + "'")
      .With("argument", std::string(name));
}

}  // namespace ep_runtime
