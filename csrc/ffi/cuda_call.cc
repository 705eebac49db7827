// CudaCall: one device's part of a call.
#include "ffi/cuda_call.h"

#include <string>

namespace ep_runtime {

Status CudaCall::ReadRowBytes(const Operand& rows, int64_t width, int32_t* bytes) const {
  const int64_t row_bytes = width * rows.element_bytes();
  if (row_bytes % 16 != 0) {
    return Refused(frame.call, rows.name(),
                   "a row of " + std::string(rows.name()) +
                       " must be a multiple of 16 bytes on NVIDIA GPUs, got " +
                       std::to_string(row_bytes) + " (hidden_size " + std::to_string(width) +
                       " of " + std::to_string(rows.element_bytes()) + " bytes)");
  }
  *bytes = static_cast<int32_t>(row_bytes);
  return Status();
}

Status CudaCall::ReadSummed(const Operand& rows, cuda::RowType* type) const {
  if (ToFloatType(rows.type(), type)) return Status();
  return rows.MustBe("float32, bfloat16 or float16 on NVIDIA GPUs");
}

Status CudaCall::Launched(cudaError_t error) const {
  if (error == cudaSuccess) return Status();
  return Internal("CUDA: " + std::string(frame.call) + " of layer " + context.layer.name +
                  " could not be launched: " + cudaGetErrorString(error))
      .With("layer", context.layer.name)
      .With("op", std::string(frame.call))
      .With("cuda_error", int64_t{error});
}

}  // namespace ep_runtime
