#ifndef EP_RUNTIME_CPU_FRESH_MEMORY_H_
#define EP_RUNTIME_CPU_FRESH_MEMORY_H_

#include <cstdint>

namespace ep_runtime {

// Asks for huge pages behind a large result. XLA allocates results anew for every call, and
// faulting them in by 4 KiB pages costs several times the copy itself.
void PreferHugePages(void* data, int64_t bytes);

// Brings a large result in with one system call, instead of a fault for each page as rows arrive.
void BringIn(void* data, int64_t bytes);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CPU_FRESH_MEMORY_H_
