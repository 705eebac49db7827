// Hints to the system about pages of large results.
#ifndef EP_RUNTIME_CPU_FRESH_MEMORY_H_
#define EP_RUNTIME_CPU_FRESH_MEMORY_H_

#include <cstdint>

namespace ep_runtime {

// Asks for huge pages behind a large result. XLA allocates results anew for every call, and page
// faults of 4 KiB each cost several times the copy itself.
void PreferHugePages(void* data, int64_t bytes);

// Brings in a large result by one system call, instead of by a page fault each time rows arrive.
void BringIn(void* data, int64_t bytes);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_FRESH_MEMORY_H_
