// CudaCall: one device's part of a call.
#ifndef EP_RUNTIME_FFI_CUDA_CALL_H_
#define EP_RUNTIME_FFI_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "core/groups/call.h"
#include "cuda/device/group_device.h"
#include "ffi/call_frame.h"
#include "ffi/read_call.h"

namespace ep_runtime {

// One device's part of a call: the stream to launch on, and functions that read operands for CUDA's
// kernels.
struct CudaCall {
  const CallFrame& frame;
  const CallContext& context;
  const cuda::CudaGroup& group;
  const cuda::LocalRank& rank;
  cuda::CallName name;
  cudaStream_t stream;
  const Attributes& attributes;
  uint64_t run;             // number of the program's run, the same on every device
  bool shares_sms = false;  // true: kernels of an exchange between nodes hold some SMs meanwhile

  // Reads the bytes of a row, which must be a multiple of 16 for bulk copies.
  Status ReadRowBytes(const Operand& rows, int64_t width, int32_t* bytes) const;
  // Sets the row type. Rows of types that kernels cannot compute with are moved as bytes.
  template <typename Params>
  Status ReadRows(const Operand& rows, int64_t width, Params* params) const {
    if (!ToFloatType(rows.type(), &params->type)) params->type = cuda::RowType::kBytes;
    return ReadRowBytes(rows, width, &params->row_bytes);
  }
  // Reads the type of rows that are summed: f32, bf16 or f16.
  Status ReadSummed(const Operand& rows, cuda::RowType* type) const;
  // Whether tokens may be f32 sums of narrower rows.
  bool may_widen() const {
    return context.group->options().combine_precision == CombinePrecision::kExact;
  }
  // Returns an error with the op's name if the launch failed.
  Status Launched(cudaError_t error) const;
};

// Checks one op and launches it. Each op has a file <op>_ffi_cuda.cc.
Status LaunchPrepareCall(const CudaCall& call);
Status LaunchDispatchCall(const CudaCall& call);
Status LaunchCombineCall(const CudaCall& call);
Status LaunchDispatchBwdCall(const CudaCall& call);
Status LaunchCombineBwdCall(const CudaCall& call);
Status LaunchPushCopiesCall(const CudaCall& call);
Status LaunchReturnCopiesCall(const CudaCall& call);
Status LaunchBlockCall(const CudaCall& call);
Status LaunchBlockBwdCall(const CudaCall& call);
// For groups with one rank per node: rows are sent over NCCL.
Status LaunchRailDispatchCall(const CudaCall& call);
Status LaunchRailCombineCall(const CudaCall& call);
Status LaunchRailDispatchBwdCall(const CudaCall& call);
Status LaunchRailCombineBwdCall(const CudaCall& call);
// For groups over nodes: block calls beside which arrays cross between nodes.
Status LaunchRailBlockCall(const CudaCall& call);
Status LaunchRailBlockBwdCall(const CudaCall& call);
// For benchmarks. The clock belongs to no group.
Status LaunchCeilingCall(const CudaCall& call);
extern XLA_FFI_Handler* const kClockV1;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_CUDA_CALL_H_
