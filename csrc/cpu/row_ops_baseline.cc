// Row arithmetic compiled for every processor.
#include "cpu/row_ops_impl.h"

namespace ep_runtime {
const RowOps* RowOpsBaseline() { return &kRowOps; }
}  // namespace ep_runtime
