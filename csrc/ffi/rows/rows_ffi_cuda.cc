#include "ffi/rows/rows_ffi_cuda.h"

#include <string>

#include "ffi/cuda_call.h"

namespace ep_runtime {

using xla::ffi::DataType;

Status ReadRowGroups(const CallFrame& frame, const Buffer& sizes, const char* name,
                     const Buffer& rows, cuda::rows::RowGroups* groups) {
  const int64_t slabs = sizes.dim(0);
  EP_RETURN_IF_ERROR(CheckArray(frame, "group_sizes", sizes, DataType::S32, {slabs, sizes.dim(1)}));
  if (slabs < 1 || rows.dims.size() != 2 || rows.dim(0) % slabs != 0) {
    return InvalidArgument(std::string(frame.call) + ": " + name +
                           " must be [S * C, width] with group_sizes [S, L], got " +
                           std::to_string(rows.dims.size()) + " dims, the first " +
                           std::to_string(rows.dim(0)) + ", and S=" + std::to_string(slabs))
        .With("argument", std::string(name));
  }
  const bool whole = sizes.dim(1) == 0;
  groups->sizes = whole ? nullptr : static_cast<const int32_t*>(sizes.data);
  groups->num_slabs = static_cast<int32_t>(slabs);
  groups->groups_per_slab = whole ? 1 : static_cast<int32_t>(sizes.dim(1));
  groups->slab_rows = static_cast<int32_t>(rows.dim(0) / slabs);
  return Status();
}

Status ReadFloatRows(const CallFrame& frame, const char* name, const Buffer& got,
                     cuda::RowType* type) {
  if (ToRowType(got.dtype, type)) return Status();
  return InvalidArgument(std::string(frame.call) + ": " + name +
                         " must be float32, bfloat16 or float16")
      .With("argument", std::string(name));
}

}  // namespace ep_runtime
