// EpText: a text that a C function returns to its caller.
#ifndef EP_RUNTIME_CORE_BASE_C_TEXT_H_
#define EP_RUNTIME_CORE_BASE_C_TEXT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/base/status.h"

namespace ep_runtime {

// The caller's buffer. A text is cut to the buffer's size, which includes the zero at the end.
struct EpText {
  char* data;
  int64_t size;
};

// Writes a text and returns its length.
inline int64_t Say(const std::string& text, EpText out) {
  const auto length = std::min(static_cast<int64_t>(text.size()), out.size - 1);
  std::memcpy(out.data, text.data(), length);
  out.data[length] = 0;
  return length;
}

// Writes an error's text and returns -1.
inline int64_t Fail(const Status& status, EpText error) {
  Say(status.text(), error);
  return -1;
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_C_TEXT_H_
