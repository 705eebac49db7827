// Mapping: a shared mapping of a memfd.
#ifndef EP_RUNTIME_CORE_MEMORY_MAPPING_H_
#define EP_RUNTIME_CORE_MEMORY_MAPPING_H_

#include <cstdint>
#include <utility>

#include "core/base/status.h"

namespace ep_runtime {

// A shared mapping of a whole memfd. The fd may be closed once it is mapped.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  // Maps `fd`. Fails if the file is shorter than `bytes`. `what` names the file in errors.
  static Status Map(int fd, int64_t bytes, const char* what, Mapping* out);

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_MAPPING_H_
