// Mapping: maps a memfd.
#include "core/memory/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ep_runtime {

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Status Mapping::Map(int fd, int64_t bytes, const char* what, Mapping* out) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return InvalidArgument(std::string(what) + " fd " + std::to_string(fd) +
                           " cannot be read: " + std::strerror(errno));
  }
  if (info.st_size < bytes) {
    return InvalidArgument(std::string(what) + " must hold " + std::to_string(bytes) +
                           " bytes, its file has " + std::to_string(info.st_size));
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return Internal(std::string("cannot map ") + std::to_string(bytes) + " bytes of " + what +
                    ": " + std::strerror(errno));
  }
  // A forked child drives no rank, so its stray writes must not reach the peers.
  madvise(data, bytes, MADV_DONTFORK);
  out->data_ = static_cast<uint8_t*>(data);
  out->bytes_ = bytes;
  return Status();
}

}  // namespace ep_runtime
