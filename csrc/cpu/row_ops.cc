#include "cpu/row_ops.h"

namespace ep_runtime {
namespace {

const RowOps* Pick() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (RowOpsAvx512() != nullptr && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
    return RowOpsAvx512();
  }
  // Every processor with AVX2 has F16C and FMA, which the flags of that file also allow.
  if (RowOpsAvx2() != nullptr && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return RowOpsAvx2();
  }
#endif
  return RowOpsBaseline();
}

}  // namespace

const RowOps& GetRowOps() {
  static const RowOps* ops = Pick();
  return *ops;
}

}  // namespace ep_runtime
