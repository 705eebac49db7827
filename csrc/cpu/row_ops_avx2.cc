// Row arithmetic compiled for AVX2.
#include "cpu/row_ops_impl.h"

namespace ep_runtime {
const RowOps* RowOpsAvx2() {
#if defined(__AVX2__)
  return &kRowOps;
#else
  return nullptr;
#endif
}
}  // namespace ep_runtime
