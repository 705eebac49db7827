// Products of 8-bit operands with f32 scales, and the copies that go before products.

#include <cstdint>
#include <string>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/gemm/copies/dequantize.h"
#include "cuda/gemm/copies/transpose.h"
#include "cuda/gemm/grouped_gemm.h"
#include "ffi/gemm/grouped_gemm_ffi_cuda.h"
#include "ffi/read_call.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

using cuda::FloatType;
using cuda::GemmProduct;
using cuda::GemmScaling;
using cuda::GroupedGemmParams;
using ffi::DataType;

constexpr int64_t kBlockValues = 128;  // along each dim that share a scale

int64_t Blocks(int64_t values) { return (values + kBlockValues - 1) / kBlockValues; }

// 8-bit values travel as uint8, wherever they are.
FloatType NarrowType(int64_t e5m2) { return e5m2 != 0 ? FloatType::kE5M2 : FloatType::kE4M3; }

Status ReadOut(const CallFrame& frame, const Buffer& got, FloatType* type) {
  if (got.dtype != DataType::F32 && got.dtype != DataType::BF16) {
    return InvalidArgument(std::string(frame.call) + ": out must be float32 or bfloat16")
        .With("argument", std::string("out"));
  }
  *type = got.dtype == DataType::F32 ? FloatType::kF32 : FloatType::kBF16;
  return Status();
}

// group_sizes [S, L] of `rows` rows in slabs of equal size.
Status ReadGroups(const CallFrame& frame, const Buffer& sizes, int64_t rows,
                  cuda::gemm::Groups* groups) {
  const int64_t slabs = sizes.dim(0);
  EP_RETURN_IF_ERROR(CheckArray(frame, "group_sizes", sizes, DataType::S32, {slabs, sizes.dim(1)}));
  if (slabs < 1 || rows < 0 || rows % slabs != 0) {
    return InvalidArgument(std::string(frame.call) + ": " + std::to_string(rows) +
                           " rows must be those of S=" + std::to_string(slabs) + " equal slabs")
        .With("argument", std::string("group_sizes"));
  }
  groups->sizes = static_cast<const int32_t*>(sizes.data);
  groups->num_groups = static_cast<int32_t>(slabs * sizes.dim(1));
  groups->groups_per_slab = static_cast<int32_t>(sizes.dim(1));
  groups->num_experts = groups->num_groups;
  groups->slab_rows = static_cast<int32_t>(rows / slabs);
  return Status();
}

Status ReadSizes(const CallFrame& frame, int64_t rows, GroupedGemmParams* params) {
  cuda::gemm::Groups groups{};
  EP_RETURN_IF_ERROR(ReadGroups(frame, frame.args[0], rows, &groups));
  params->num_slabs = static_cast<int32_t>(frame.args[0].dim(0));
  params->slab_rows = groups.slab_rows;
  params->groups_per_slab = groups.groups_per_slab;
  params->group_sizes = groups.sizes;
  return Status();
}

// lhs_scale and rhs_scale are operands 3 and 4.
Status ReadScales(const CallFrame& frame, GroupedGemmParams* params) {
  const Buffer& sizes = frame.args[0];
  const int64_t in = params->in_features, out = params->out_features, experts = params->num_experts;
  const bool by_expert = params->product == GemmProduct::kWeightGrad;
  Dims lhs = sizes.dims;
  Dims rhs = by_expert ? sizes.dims : Dims{experts};
  if (params->scaling == GemmScaling::kBlock) {
    const int64_t rows = int64_t{params->num_slabs} * params->slab_rows;
    lhs = {rows, Blocks(params->product == GemmProduct::kDataGrad ? out : in)};
    rhs = {experts, Blocks(in), Blocks(out)};
  }
  EP_RETURN_IF_ERROR(CheckArray(frame, "lhs_scale", frame.args[3], DataType::F32, lhs));
  EP_RETURN_IF_ERROR(CheckArray(frame, "rhs_scale", frame.args[4], DataType::F32, rhs));
  params->lhs_scale = static_cast<const float*>(frame.args[3].data);
  params->rhs_scale = static_cast<const float*>(frame.args[4].data);
  return Status();
}

Status ReadOperands(const CallFrame& frame, GroupedGemmParams* params) {
  EP_RETURN_IF_ERROR(CheckType(frame, "lhs", frame.args[1], DataType::U8));
  EP_RETURN_IF_ERROR(CheckType(frame, "rhs", frame.args[2], DataType::U8));
  EP_RETURN_IF_ERROR(ReadOut(frame, frame.rets[0], &params->out_type));
  params->lhs = frame.args[1].data;
  params->rhs = frame.args[2].data;
  params->out = frame.rets[0].data;
  return Status();
}

Status ReadBias(const CallFrame& frame, const Buffer& bias, GroupedGemmParams* params) {
  if (bias.dims == Dims{0, 0}) return Status();
  EP_RETURN_IF_ERROR(CheckShape(frame, "bias", bias, {params->num_experts, params->out_features}));
  if (bias.dtype == DataType::F16) {
    params->bias_type = FloatType::kF16;
  } else if (bias.dtype == DataType::BF16) {
    params->bias_type = FloatType::kBF16;
  } else {
    EP_RETURN_IF_ERROR(CheckType(frame, "bias", bias, DataType::F32));
    params->bias_type = FloatType::kF32;
  }
  params->bias = bias.data;
  return Status();
}

Status Launch(const CallFrame& frame, cudaStream_t stream, GroupedGemmParams params) {
  params.tuning = cuda::TunedGemm(params);
  return cuda::Check(cuda::LaunchGroupedGemm(stream, params), frame.call);
}

// ep_fp8_grouped_gemm_v1(group_sizes s32 [S, L], lhs u8 [S * C, K'], rhs u8 [G, N', K'],
//                        lhs_scale f32 [S, L], rhs_scale f32 [G], bias [G, N'] or f32 [0, 0];
//                        data_grad=0, clear_slack, block=0, e5m2: lhs is) -> [S * C, N'] bf16 or
//                        f32
//   data_grad=1: lhs [S * C, N'], rhs [G, K', N'], no bias -> [S * C, K']
//   block=1: lhs_scale [S * C, ceil(contracted / 128)], rhs_scale [G, ceil(K'/128), ceil(N'/128)]
ffi::Error GroupedGemm(cudaStream_t stream, int64_t data_grad, int64_t clear_slack, int64_t block,
                       int64_t e5m2, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) -> Status {
    frame.call = "ep_fp8_grouped_gemm_v1";
    EP_RETURN_IF_ERROR(CheckCount(frame, 6, 1));
    GroupedGemmParams params{};
    params.product = data_grad != 0 ? GemmProduct::kDataGrad : GemmProduct::kForward;
    params.scaling = block != 0 ? GemmScaling::kBlock : GemmScaling::kTensor;
    params.clear_slack = clear_slack != 0;
    params.type = NarrowType(e5m2);
    params.rhs_type = FloatType::kE4M3;
    EP_RETURN_IF_ERROR(ReadOperands(frame, &params));
    const Buffer& rhs = frame.args[2];
    const int64_t rows = frame.args[1].dim(0), made = rhs.dim(1), contracted = rhs.dim(2);
    EP_RETURN_IF_ERROR(CheckShape(frame, "rhs", rhs, {rhs.dim(0), made, contracted}));
    EP_RETURN_IF_ERROR(CheckShape(frame, "lhs", frame.args[1], {rows, contracted}));
    EP_RETURN_IF_ERROR(CheckShape(frame, "out", frame.rets[0], {rows, made}));
    EP_RETURN_IF_ERROR(ReadSizes(frame, rows, &params));
    params.num_experts = static_cast<int32_t>(rhs.dim(0));
    params.in_features = static_cast<int32_t>(data_grad != 0 ? made : contracted);
    params.out_features = static_cast<int32_t>(data_grad != 0 ? contracted : made);
    EP_RETURN_IF_ERROR(ReadScales(frame, &params));
    EP_RETURN_IF_ERROR(ReadBias(frame, frame.args[5], &params));
    return Launch(frame, stream, params);
  });
}

// ep_fp8_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs u8 [K', S * P], grad u8 [N', S * P],
//                           lhs_scale f32 [S, L], grad_scale f32 [S, L]; slab_rows=C, e5m2: grad
//                           is)
//   -> [G, K', N'] bf16 or f32; P is PaddedSlabRows(C, L)
ffi::Error GroupedGemmDw(cudaStream_t stream, int64_t slab_rows, int64_t e5m2,
                         ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) -> Status {
    frame.call = "ep_fp8_grouped_gemm_dw_v1";
    EP_RETURN_IF_ERROR(CheckCount(frame, 5, 1));
    GroupedGemmParams params{};
    params.product = GemmProduct::kWeightGrad;
    params.scaling = GemmScaling::kTensor;
    params.type = FloatType::kE4M3;
    params.rhs_type = NarrowType(e5m2);
    EP_RETURN_IF_ERROR(ReadOperands(frame, &params));
    const Buffer& sizes = frame.args[0];
    const Buffer& out = frame.rets[0];
    EP_RETURN_IF_ERROR(ReadSizes(frame, slab_rows * sizes.dim(0), &params));
    const int64_t padded =
        sizes.dim(0) * cuda::gemm::PaddedSlabRows(params.slab_rows, params.groups_per_slab);
    const int64_t in = frame.args[1].dim(0), features = frame.args[2].dim(0);
    EP_RETURN_IF_ERROR(CheckShape(frame, "lhs", frame.args[1], {in, padded}));
    EP_RETURN_IF_ERROR(CheckShape(frame, "grad", frame.args[2], {features, padded}));
    EP_RETURN_IF_ERROR(CheckShape(frame, "out", out, {out.dim(0), in, features}));
    params.num_experts = static_cast<int32_t>(out.dim(0));
    params.in_features = static_cast<int32_t>(in);
    params.out_features = static_cast<int32_t>(features);
    EP_RETURN_IF_ERROR(ReadScales(frame, &params));
    return Launch(frame, stream, params);
  });
}

// ep_transpose_rows_v1(group_sizes s32 [S, L], rows u8 or f32 [S * C, width]) -> [width, S * P], of
// which only what FindPaddedRows names is written
ffi::Error TransposeRows(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) -> Status {
    frame.call = "ep_transpose_rows_v1";
    EP_RETURN_IF_ERROR(CheckCount(frame, 2, 1));
    const Buffer& rows = frame.args[1];
    const Buffer& out = frame.rets[0];
    const DataType type = rows.dtype == DataType::F32 ? DataType::F32 : DataType::U8;
    EP_RETURN_IF_ERROR(CheckArray(frame, "rows", rows, type, {rows.dim(0), rows.dim(1)}));
    cuda::gemm::Groups groups{};
    EP_RETURN_IF_ERROR(ReadGroups(frame, frame.args[0], rows.dim(0), &groups));
    const int64_t slabs = frame.args[0].dim(0);
    const int64_t padded =
        slabs * cuda::gemm::PaddedSlabRows(groups.slab_rows, groups.groups_per_slab);
    EP_RETURN_IF_ERROR(CheckArray(frame, "out", out, type, {rows.dim(1), padded}));
    const auto count = static_cast<int32_t>(slabs), width = static_cast<int32_t>(rows.dim(1));
    cudaError_t error = cudaSuccess;
    if (type == DataType::F32) {
      error = cuda::gemm::LaunchTranspose(
          stream, cuda::gemm::TransposedFloatRows{groups, static_cast<const float*>(rows.data),
                                                  static_cast<float*>(out.data), count, width});
    } else {
      error = cuda::gemm::LaunchTranspose(
          stream, cuda::gemm::TransposedRows{groups, static_cast<const uint8_t*>(rows.data),
                                             static_cast<uint8_t*>(out.data), count, width});
    }
    return cuda::Check(error, frame.call);
  });
}

// ep_transpose_weights_v1(weights u8 [G, K', N']) -> [G, N', K']
ffi::Error TransposeWeights(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) -> Status {
    frame.call = "ep_transpose_weights_v1";
    EP_RETURN_IF_ERROR(CheckCount(frame, 1, 1));
    const Buffer& from = frame.args[0];
    const Dims dims = {from.dim(0), from.dim(1), from.dim(2)};
    EP_RETURN_IF_ERROR(CheckArray(frame, "weights", from, DataType::U8, dims));
    EP_RETURN_IF_ERROR(
        CheckArray(frame, "out", frame.rets[0], from.dtype, {dims[0], dims[2], dims[1]}));
    const cuda::gemm::TransposedPlanes copy{
        static_cast<const uint8_t*>(from.data), static_cast<uint8_t*>(frame.rets[0].data),
        static_cast<int32_t>(dims[0]), static_cast<int32_t>(dims[1]),
        static_cast<int32_t>(dims[2])};
    return cuda::Check(cuda::gemm::LaunchTranspose(stream, copy), frame.call);
  });
}

Status ReadDequantize(const CallFrame& frame, cuda::gemm::DequantizeParams* params) {
  const Buffer& sizes = frame.args[0];
  const Buffer& data = frame.args[1];
  const Buffer& scale = frame.args[2];
  EP_RETURN_IF_ERROR(
      CheckArray(frame, "data", data, DataType::U8, {data.dim(0), data.dim(1), data.dim(2)}));
  EP_RETURN_IF_ERROR(CheckArray(frame, "out", frame.rets[0], DataType::BF16, data.dims));
  if (sizes.dims != Dims{0, 0}) {
    EP_RETURN_IF_ERROR(ReadGroups(frame, sizes, data.dim(0) * data.dim(1), &params->groups));
    EP_RETURN_IF_ERROR(CheckShape(frame, "group_sizes", sizes, {data.dim(0), sizes.dim(1)}));
  }
  params->e8m0 = scale.dtype == DataType::U8;
  if (!params->e8m0) EP_RETURN_IF_ERROR(CheckType(frame, "scale", scale, DataType::F32));
  const auto blocks = [](int64_t values, int64_t each) { return (values + each - 1) / each; };
  EP_RETURN_IF_ERROR(CheckShape(frame, "scale", scale,
                                {data.dim(0), blocks(data.dim(1), params->line_values),
                                 blocks(data.dim(2), params->column_values)}));
  params->data = data.data;
  params->scale = scale.data;
  params->planes = static_cast<int32_t>(data.dim(0));
  params->lines = static_cast<int32_t>(data.dim(1));
  params->width = static_cast<int32_t>(data.dim(2));
  params->out = frame.rets[0].data;
  return Status();
}

// ep_dequantize_v1(group_sizes s32 [S, L] or [0, 0], data u8 [S, lines, width], scale f32 or e8m0
// as
//                  u8 [S, ceil(lines / line_values), ceil(width / column_values)];
//                  line_values, column_values, e5m2) -> bf16 like data, rows of no group not
//                  written
ffi::Error Dequantize(cudaStream_t stream, int64_t line_values, int64_t column_values, int64_t e5m2,
                      ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Answer(args, rets, [&](CallFrame frame) -> Status {
    frame.call = "ep_dequantize_v1";
    EP_RETURN_IF_ERROR(CheckCount(frame, 3, 1));
    if (line_values < 1 || column_values < 1) {
      return InvalidArgument(std::string(frame.call) + ": scales must be of values")
          .With("argument", std::string("line_values"));
    }
    cuda::gemm::DequantizeParams params{};
    params.line_values = static_cast<int32_t>(line_values);
    params.column_values = static_cast<int32_t>(column_values);
    params.type = NarrowType(e5m2);
    EP_RETURN_IF_ERROR(ReadDequantize(frame, &params));
    return cuda::Check(cuda::gemm::LaunchDequantize(stream, params), frame.call);
  });
}

#define EP_RUNTIME_BINDING(...)                                             \
  ffi::Ffi::Bind()                                                          \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() __VA_ARGS__.RemainingArgs() \
      .RemainingRets()
XLA_FFI_DEFINE_HANDLER(kGemm, GroupedGemm,
                       EP_RUNTIME_BINDING(.Attr<int64_t>("data_grad")
                                              .Attr<int64_t>("clear_slack")
                                              .Attr<int64_t>("block")
                                              .Attr<int64_t>("e5m2")),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGemmDw, GroupedGemmDw,
                       EP_RUNTIME_BINDING(.Attr<int64_t>("slab_rows").Attr<int64_t>("e5m2")),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRows, TransposeRows, EP_RUNTIME_BINDING(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kWeights, TransposeWeights, EP_RUNTIME_BINDING(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDequantize, Dequantize,
                       EP_RUNTIME_BINDING(.Attr<int64_t>("line_values")
                                              .Attr<int64_t>("column_values")
                                              .Attr<int64_t>("e5m2")),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const kFp8GroupedGemmV1 = kGemm;
XLA_FFI_Handler* const kFp8GroupedGemmDwV1 = kGemmDw;
XLA_FFI_Handler* const kTransposeRowsV1 = kRows;
XLA_FFI_Handler* const kTransposeWeightsV1 = kWeights;
XLA_FFI_Handler* const kDequantizeV1 = kDequantize;

}  // namespace ep_runtime
