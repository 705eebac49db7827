// Row arithmetic compiled for AVX-512.
#include "cpu/row_ops_impl.h"

namespace ep_runtime {
const RowOps* RowOpsAvx512() {
#if defined(__AVX512F__)
  return &kRowOps;
#else
  return nullptr;
#endif
}
}  // namespace ep_runtime
