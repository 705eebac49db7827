// Handlers of exchanges between nodes.
#ifndef EP_RUNTIME_FFI_NCCL_NCCL_FFI_CUDA_H_
#define EP_RUNTIME_FFI_NCCL_NCCL_FFI_CUDA_H_

#include "xla/ffi/api/c_api.h"

namespace ep_runtime {

// Handlers of ep_nccl_exchange_v1, ep_nccl_all_gather_v1, ep_nccl_counted_v1 and
// ep_nccl_prepare_v1.
XLA_FFI_Error* NcclExchangeV1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* NcclAllGatherV1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* NcclCountedV1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* NcclPrepareV1(XLA_FFI_CallFrame* frame);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_NCCL_FFI_CUDA_H_
