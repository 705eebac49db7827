#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/rows/group_sums.h"
#include "ffi/read_call.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

// ep_group_sums_v1(group_sizes s32 [S, L], values [S * C, W]) -> f32 [G, W]
Status LaunchSums(CallFrame frame, cudaStream_t stream) {
  frame.call = "ep_group_sums_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 2, 1));
  const Buffer& values = frame.args[1];
  const Buffer& sums = frame.rets[0];
  cuda::GroupSumsParams params{};
  EP_RETURN_IF_ERROR(ReadRowGroups(frame, frame.args[0], "values", values, &params.groups));
  EP_RETURN_IF_ERROR(ReadFloatRows(frame, "values", values, &params.type));
  EP_RETURN_IF_ERROR(CheckArray(frame, "sums", sums, DataType::F32, {sums.dim(0), values.dim(1)}));
  params.width = static_cast<int32_t>(values.dim(1));
  params.num_experts = static_cast<int32_t>(sums.dim(0));
  params.values = values.data;
  params.sums = static_cast<float*>(sums.data);
  return cuda::Check(cuda::LaunchGroupSums(stream, params), frame.call);
}

ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) { return LaunchSums(std::move(frame), stream); });
}

XLA_FFI_DEFINE_HANDLER(
    kSums, Run,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kGroupSumsV1 = kSums;

}  // namespace ep_runtime
