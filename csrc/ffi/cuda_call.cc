#include "ffi/cuda_call.h"

#include <string>

namespace ep_runtime {

using xla::ffi::DataType;

Status CudaCall::ReadPlan(const std::vector<Buffer>& buffers, size_t first, const Sizes& sizes,
                          cuda::MutablePlan* plan) const {
  MutablePlan read{};
  EP_RETURN_IF_ERROR(
      ::ep_runtime::ReadPlan(frame, buffers, first, sizes, context.group->sizes().ep_size, &read));
  *plan = {read.dst_rank,    read.dst_row, read.recv_count,  read.staged_start, read.staged_row,
           read.staged_slot, read.kept,    read.group_sizes, read.num_recv};
  return Status();
}

Status CudaCall::RowBytes(const char* name, const Buffer& rows, int64_t width,
                          int32_t* bytes) const {
  const int64_t row_bytes = width * ElementBytes(rows);
  if (row_bytes % 16 != 0) {
    return InvalidArgument(std::string(OpName(frame.op)) + ": a row of " + name +
                           " must be a multiple of 16 bytes on NVIDIA GPUs, got " +
                           std::to_string(row_bytes) + " (hidden_size " + std::to_string(width) +
                           " of " + std::to_string(ElementBytes(rows)) + " bytes)")
        .With("argument", std::string(name));
  }
  *bytes = static_cast<int32_t>(row_bytes);
  return Status();
}

Status CudaCall::SummedType(const char* name, const Buffer& rows, cuda::RowType* type) const {
  if (ToRowType(rows.dtype, type)) return Status();
  return InvalidArgument(std::string(OpName(frame.op)) + ": " + name +
                         " must be float32, bfloat16 or float16 on NVIDIA GPUs")
      .With("argument", std::string(name));
}

Status CudaCall::Launched(cudaError_t error) const {
  if (error == cudaSuccess) return Status();
  return Internal("CUDA: " + std::string(OpName(frame.op)) + " of layer " + context.layer.name +
                  " could not be launched: " + cudaGetErrorString(error))
      .With("layer", context.layer.name)
      .With("op", std::string(OpName(frame.op)))
      .With("cuda_error", int64_t{error});
}

bool ToRowType(DataType dtype, cuda::RowType* type) {
  switch (dtype) {
    case DataType::F32:
      *type = cuda::RowType::kF32;
      return true;
    case DataType::BF16:
      *type = cuda::RowType::kBF16;
      return true;
    case DataType::F16:
      *type = cuda::RowType::kF16;
      return true;
    default:
      return false;
  }
}

cuda::CallSizes ToCuda(const Sizes& sizes) {
  return {static_cast<int32_t>(sizes.tokens), static_cast<int32_t>(sizes.top_k),
          static_cast<int32_t>(sizes.capacity), static_cast<int32_t>(sizes.experts),
          static_cast<int32_t>(sizes.width)};
}

cuda::Plan Const(const cuda::MutablePlan& plan) {
  return {plan.dst_rank,    plan.dst_row, plan.recv_count,  plan.staged_start, plan.staged_row,
          plan.staged_slot, plan.kept,    plan.group_sizes, plan.num_recv};
}

}  // namespace ep_runtime
