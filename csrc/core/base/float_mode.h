// Flushes subnormal numbers to zero in the calling thread.
#ifndef EP_RUNTIME_CORE_BASE_FLOAT_MODE_H_
#define EP_RUNTIME_CORE_BASE_FLOAT_MODE_H_

#include <cstdint>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ep_runtime {

// Makes the calling thread treat subnormal operands and results as zero. XLA's threads do the same,
// and both transports must give the same bits. A new thread inherits the mode of the thread that
// created it.
inline void FlushSubnormals() {
#if defined(__SSE__)
  constexpr uint32_t kFlushToZero = 0x8000;
  constexpr uint32_t kSubnormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kSubnormalsAreZero);
#elif defined(__aarch64__)
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" : : "r"(mode | kFlushToZero));
#endif
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_FLOAT_MODE_H_
