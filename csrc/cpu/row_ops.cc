// Chooses the row arithmetic for this processor.
#include "cpu/row_ops.h"

#include <atomic>
#include <initializer_list>

namespace ep_runtime {
namespace {

bool HasAvx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd");
#else
  return false;
#endif
}

bool HasAvx2() {
#if defined(__x86_64__)
  // row_ops_avx2.cc is also compiled with BMI2 and F16C. Every processor with AVX2 and FMA has
  // both.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

// Returns the table of a level, or null if this processor or build lacks that level.
const RowOps* OfLevel(RowOpsLevel level) {
  switch (level) {
    case kAvx512:
      return HasAvx512() ? RowOpsAvx512() : nullptr;
    case kAvx2:
      return HasAvx2() ? RowOpsAvx2() : nullptr;
    case kBaseline:
      return RowOpsBaseline();
    case kBestRowOps:
      break;
  }
  for (RowOpsLevel each : {kAvx512, kAvx2}) {
    if (OfLevel(each) != nullptr) return OfLevel(each);
  }
  return RowOpsBaseline();
}

std::atomic<const RowOps*>& Current() {
  static std::atomic<const RowOps*> current{OfLevel(kBestRowOps)};
  return current;
}

}  // namespace

const RowOps& GetRowOps() { return *Current().load(std::memory_order_relaxed); }

bool UseRowOps(RowOpsLevel level) {
  const RowOps* ops = OfLevel(level);
  if (ops != nullptr) Current().store(ops, std::memory_order_relaxed);
  return ops != nullptr;
}

}  // namespace ep_runtime
