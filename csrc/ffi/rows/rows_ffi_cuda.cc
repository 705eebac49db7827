// Reads slabs and groups of rows.
#include "ffi/rows/rows_ffi_cuda.h"

#include <string>

namespace ep_runtime {

Status ReadRowGroups(const Operand& sizes, const Operand& rows, cuda::rows::RowGroups* groups) {
  const int64_t slabs = sizes.dim(0);
  EP_RETURN_IF_ERROR(sizes.Read({slabs, sizes.dim(1)}, &groups->sizes));
  if (slabs < 1 || rows.dims().size() != 2 || rows.dim(0) % slabs != 0) {
    return rows.MustBe("[S * C, width] with group_sizes [S, L], got " +
                       std::to_string(rows.dims().size()) + " dims, the first " +
                       std::to_string(rows.dim(0)) + ", and S=" + std::to_string(slabs));
  }
  const bool whole = sizes.dim(1) == 0;
  if (whole) groups->sizes = nullptr;
  groups->num_slabs = static_cast<int32_t>(slabs);
  groups->groups_per_slab = whole ? 1 : static_cast<int32_t>(sizes.dim(1));
  groups->slab_rows = static_cast<int32_t>(rows.dim(0) / slabs);
  return Status();
}

}  // namespace ep_runtime
