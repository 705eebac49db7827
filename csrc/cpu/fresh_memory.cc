// Hints to the operating system about pages of large results.
#include "cpu/fresh_memory.h"

#include <sys/mman.h>

#include "core/memory/board.h"

namespace ep_runtime {
namespace {

constexpr uintptr_t kHugePageBytes = 2 << 20;

}  // namespace

void PreferHugePages(void* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
  const uintptr_t last = (address + static_cast<uintptr_t>(bytes)) & ~(kHugePageBytes - 1);
  // Only a hint: if the system refuses it, small pages work too.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void BringIn(void* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (bytes < static_cast<int64_t>(kHugePageBytes)) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = address & ~static_cast<uintptr_t>(kPageBytes - 1);
  // Only a hint: pages that this leaves out are populated on first write.
  madvise(reinterpret_cast<void*>(first), address + bytes - first, MADV_POPULATE_WRITE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace ep_runtime
