// XLA target of sums of groups.
#include <cstdint>

#include "cuda/rows/group_sums.h"
#include "ffi/rows/rows_ffi_cuda.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

// ep_group_sums_v1(group_sizes s32 [S, L], values [S * C, W]) -> f32 [G, W]
Status LaunchSums(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(2, 1));
  const auto [group_sizes, values] = frame.Args("group_sizes", "values");
  const auto [sums] = frame.Rets("sums");
  cuda::GroupSumsParams params{};
  EP_RETURN_IF_ERROR(ReadRowGroups(group_sizes, values, &params.groups));
  EP_RETURN_IF_ERROR(values.ReadFloatType(&params.type));
  EP_RETURN_IF_ERROR(sums.Read({sums.dim(0), values.dim(1)}, &params.sums));
  params.width = static_cast<int32_t>(values.dim(1));
  params.num_experts = static_cast<int32_t>(sums.dim(0));
  params.values = values.data();
  return cuda::Check(cuda::LaunchGroupSums(stream, params), frame.call);
}

}  // namespace

EP_RUNTIME_STREAM_CALL(kGroupSumsV1, "ep_group_sums_v1", LaunchSums);

}  // namespace ep_runtime
