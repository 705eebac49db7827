// Hints to the operating system about pages of large results.
#ifndef EP_RUNTIME_CPU_FRESH_MEMORY_H_
#define EP_RUNTIME_CPU_FRESH_MEMORY_H_

#include <cstdint>

namespace ep_runtime {

// Asks for huge pages for a large result. XLA allocates results again for every call, and page
// faults of 4 KiB each cost several times the copy itself.
void PreferHugePages(void* data, int64_t bytes);

// Populates the pages of a large result in one system call, instead of with a page fault each as
// rows arrive.
void BringIn(void* data, int64_t bytes);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_FRESH_MEMORY_H_
