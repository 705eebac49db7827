#include "ffi/gemm/grouped_gemm_ffi_cuda.h"

#include <cstdint>
#include <string>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/product/groups.h"
#include "ffi/read_call.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

using cuda::FloatType;
using cuda::GemmProduct;
using cuda::GroupedGemmParams;
using xla::ffi::DataType;

// group_sizes [S, L] of slabs of `slab_rows` rows.
Status ReadSizes(const CallFrame& frame, int64_t slab_rows, GroupedGemmParams* params) {
  const Buffer& sizes = frame.args[0];
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "group_sizes", sizes, DataType::S32, {sizes.dim(0), sizes.dim(1)}));
  params->num_slabs = static_cast<int32_t>(sizes.dim(0));
  params->slab_rows = static_cast<int32_t>(slab_rows);
  params->groups_per_slab = static_cast<int32_t>(sizes.dim(1));
  params->group_sizes = static_cast<const int32_t*>(sizes.data);
  return Status();
}

// lhs [S * C, ...], in slabs of equal size, and group_sizes [S, L].
Status ReadRows(const CallFrame& frame, GroupedGemmParams* params) {
  const Buffer& lhs = frame.args[1];
  const int64_t slabs = frame.args[0].dim(0);
  if (slabs < 1 || lhs.dims.size() != 2 || lhs.dim(0) % slabs != 0) {
    return InvalidArgument(std::string(frame.call) +
                           ": lhs must be [S * C, K'] with group_sizes "
                           "[S, L], got " +
                           std::to_string(lhs.dims.size()) + " dims, the first " +
                           std::to_string(lhs.dim(0)) + ", and S=" + std::to_string(slabs))
        .With("argument", std::string("lhs"));
  }
  params->lhs = lhs.data;
  return ReadSizes(frame, lhs.dim(0) / slabs, params);
}

Status ReadType(const CallFrame& frame, const char* name, const Buffer& got, FloatType* type) {
  switch (got.dtype) {
    case DataType::F32:
      *type = FloatType::kF32;
      return Status();
    case DataType::BF16:
      *type = FloatType::kBF16;
      return Status();
    case DataType::F16:
      *type = FloatType::kF16;
      return Status();
    default:
      return InvalidArgument(std::string(frame.call) + ": " + name +
                             " must be float32, bfloat16 or float16")
          .With("argument", std::string(name));
  }
}

// Operands of one type, the result of that or f32.
Status ReadTypes(const CallFrame& frame, GroupedGemmParams* params) {
  const Buffer& lhs = frame.args[1];
  EP_RETURN_IF_ERROR(ReadType(frame, "lhs", lhs, &params->type));
  EP_RETURN_IF_ERROR(CheckType(frame, "rhs", frame.args[2], lhs.dtype));
  EP_RETURN_IF_ERROR(ReadType(frame, "out", frame.rets[0], &params->out_type));
  if (params->out_type == FloatType::kF32) return Status();
  return CheckType(frame, "out", frame.rets[0], lhs.dtype);
}

// bias [G, N'], or [0, 0] where there is none.
Status ReadBias(const CallFrame& frame, const Buffer& bias, GroupedGemmParams* params) {
  if (bias.dims == Dims{0, 0}) return Status();
  EP_RETURN_IF_ERROR(CheckShape(frame, "bias", bias, {params->num_experts, params->out_features}));
  EP_RETURN_IF_ERROR(ReadType(frame, "bias", bias, &params->bias_type));
  params->bias = bias.data;
  return Status();
}

Status LaunchIt(const CallFrame& frame, cudaStream_t stream, GroupedGemmParams params) {
  params.rhs = frame.args[2].data;
  params.out = frame.rets[0].data;
  params.rhs_type = params.type;
  params.tuning = cuda::TunedGemm(params);
  return cuda::Check(cuda::LaunchGroupedGemm(stream, params), frame.call);
}

// ep_tf32_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs f32 [K', S * P], grad f32 [N', S * P];
//                            slab_rows=C) -> f32 [G, K', N']; P is PaddedSlabRows(C, L)
Status LaunchTf32GemmDwCall(CallFrame frame, cudaStream_t stream, int64_t slab_rows) {
  frame.call = "ep_tf32_grouped_gemm_dw_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  GroupedGemmParams params{};
  params.product = GemmProduct::kWeightGrad;
  EP_RETURN_IF_ERROR(ReadSizes(frame, slab_rows, &params));
  EP_RETURN_IF_ERROR(CheckType(frame, "lhs", frame.args[1], DataType::F32));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  params.type = FloatType::kTF32;
  params.lhs = frame.args[1].data;
  const int64_t padded =
      params.num_slabs * cuda::gemm::PaddedSlabRows(slab_rows, params.groups_per_slab);
  const int64_t in = frame.args[1].dim(0), out = frame.args[2].dim(0);
  const Buffer& result = frame.rets[0];
  EP_RETURN_IF_ERROR(CheckShape(frame, "lhs", frame.args[1], {in, padded}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "grad", frame.args[2], {out, padded}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "out", result, {result.dim(0), in, out}));
  params.num_experts = static_cast<int32_t>(result.dim(0));
  params.in_features = static_cast<int32_t>(in);
  params.out_features = static_cast<int32_t>(out);
  return LaunchIt(frame, stream, params);
}

ffi::Error Tf32GemmDw(cudaStream_t stream, int64_t slab_rows, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) {
    return LaunchTf32GemmDwCall(std::move(frame), stream, slab_rows);
  });
}

XLA_FFI_DEFINE_HANDLER(kTf32GemmDw, Tf32GemmDw,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("slab_rows")
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kTf32GroupedGemmDwV1 = kTf32GemmDw;

// ep_grouped_gemm_v1(group_sizes s32 [S, L], lhs [S * C, K'], rhs [G, K', N'],
//                    bias [G, N'] or f32 [0, 0]; data_grad=0, clear_slack) -> [S * C, N']
//   data_grad=1: lhs [S * C, N'], no bias -> [S * C, K']
//   f32 operands are rounded to tf32.
Status LaunchGroupedGemmCall(CallFrame frame, cudaStream_t stream,
                             const GroupedGemmAttributes& attributes) {
  const bool data_grad = attributes.data_grad;
  frame.call = "ep_grouped_gemm_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 4, 1));
  GroupedGemmParams params{};
  params.product = data_grad ? GemmProduct::kDataGrad : GemmProduct::kForward;
  EP_RETURN_IF_ERROR(ReadRows(frame, &params));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  if (params.type == FloatType::kF32) params.type = FloatType::kTF32;
  const Buffer& rhs = frame.args[2];
  const int64_t rows = frame.args[1].dim(0), in = rhs.dim(1), out = rhs.dim(2);
  EP_RETURN_IF_ERROR(CheckShape(frame, "rhs", rhs, {rhs.dim(0), in, out}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "lhs", frame.args[1], {rows, data_grad ? out : in}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "out", frame.rets[0], {rows, data_grad ? in : out}));
  params.num_experts = static_cast<int32_t>(rhs.dim(0));
  params.in_features = static_cast<int32_t>(in);
  params.out_features = static_cast<int32_t>(out);
  params.clear_slack = attributes.clear_slack;
  EP_RETURN_IF_ERROR(ReadBias(frame, frame.args[3], &params));
  return LaunchIt(frame, stream, params);
}

// ep_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs [S * C, K'], grad [S * C, N']) -> [G, K', N']
Status LaunchGroupedGemmDwCall(CallFrame frame, cudaStream_t stream) {
  frame.call = "ep_grouped_gemm_dw_v1";
  EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
  GroupedGemmParams params{};
  params.product = GemmProduct::kWeightGrad;
  EP_RETURN_IF_ERROR(ReadRows(frame, &params));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  const Buffer& lhs = frame.args[1];
  const Buffer& grad = frame.args[2];
  const Buffer& out = frame.rets[0];
  EP_RETURN_IF_ERROR(CheckShape(frame, "grad", grad, {lhs.dim(0), grad.dim(1)}));
  EP_RETURN_IF_ERROR(CheckShape(frame, "out", out, {out.dim(0), lhs.dim(1), grad.dim(1)}));
  params.num_experts = static_cast<int32_t>(out.dim(0));
  params.in_features = static_cast<int32_t>(lhs.dim(1));
  params.out_features = static_cast<int32_t>(grad.dim(1));
  return LaunchIt(frame, stream, params);
}

}  // namespace ep_runtime
