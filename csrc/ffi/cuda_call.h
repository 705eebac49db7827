#ifndef EP_RUNTIME_FFI_CUDA_CALL_H_
#define EP_RUNTIME_FFI_CUDA_CALL_H_

#include <cuda_runtime.h>

#include "cuda/device/group_device.h"
#include "ffi/call_frame.h"

namespace ep_runtime {

// One device's part of a call: what to launch on, beside the operands.
struct CudaCall {
  const CallFrame& frame;
  const CallContext& context;
  const cuda::CudaGroup& group;
  const cuda::LocalRank& rank;
  cuda::CallName name;
  cudaStream_t stream;
  bool clear_slack;  // of the gradient of rows

  // Checks shapes and types of the plan arrays from `first` on among `buffers`.
  Status ReadPlan(const std::vector<Buffer>& buffers, size_t first, const Sizes& sizes,
                  cuda::MutablePlan* plan) const;
  // The bytes of a row: bulk copies move 16 at a time.
  Status RowBytes(const char* name, const Buffer& rows, int64_t width, int32_t* bytes) const;
  // Rows that are summed: f32, bf16 or f16.
  Status SummedType(const char* name, const Buffer& rows, cuda::RowType* type) const;
  // A launch that failed, by the op's name.
  Status Launched(cudaError_t error) const;
};

// f32, bf16 or f16: what kernels calculate with. False for any other type.
bool ToRowType(xla::ffi::DataType dtype, cuda::RowType* type);
cuda::CallSizes ToCuda(const Sizes& sizes);
cuda::Plan Const(const cuda::MutablePlan& plan);

// Checks and launches of one op. One per <op>_ffi_cuda.cc.
Status LaunchPrepareCall(const CudaCall& call);
Status LaunchDispatchCall(const CudaCall& call);
Status LaunchCombineCall(const CudaCall& call);
Status LaunchDispatchBwdCall(const CudaCall& call);
Status LaunchCombineBwdCall(const CudaCall& call);
// Of the bench. The clock belongs to no group.
Status LaunchCeilingCall(const CudaCall& call);
Status LaunchClockCall(const CallFrame& frame, cudaStream_t stream, int64_t hold_ns);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_CUDA_CALL_H_
