// XLA targets of products of 8-bit operands with f32 scales, and of the copies that these products
// need.

#include <cstdint>
#include <string>

#include "cuda/gemm/copies/dequantize.h"
#include "cuda/gemm/copies/transpose.h"
#include "cuda/rows/requantize_rows.h"
#include "ffi/gemm/grouped_gemm_ffi_cuda.h"
#include "ffi/stream_call.h"

namespace ep_runtime {
namespace {

using cuda::FloatType;
using cuda::GemmProduct;
using cuda::GemmScaling;
using cuda::GroupedGemmParams;
using xla::ffi::DataType;

constexpr int64_t kBlockValues = 128;  // values along each dim that share a scale

int64_t Blocks(int64_t values, int64_t each) { return (values + each - 1) / each; }

// 8-bit values are passed as uint8, so an attribute tells their format.
FloatType NarrowType(int64_t e5m2) { return e5m2 != 0 ? FloatType::kE5M2 : FloatType::kE4M3; }

// Reads group_sizes [S, L] for `rows` rows in slabs of equal size.
Status ReadGroups(const CallFrame& frame, const Operand& sizes, int64_t rows,
                  cuda::gemm::Groups* groups) {
  const int64_t slabs = sizes.dim(0);
  EP_RETURN_IF_ERROR(sizes.Read({slabs, sizes.dim(1)}, &groups->sizes));
  if (slabs < 1 || rows < 0 || rows % slabs != 0) {
    return Refused(frame.call, "group_sizes",
                   std::to_string(rows) + " rows must be those of S=" + std::to_string(slabs) +
                       " equal slabs");
  }
  groups->num_groups = static_cast<int32_t>(slabs * sizes.dim(1));
  groups->groups_per_slab = static_cast<int32_t>(sizes.dim(1));
  groups->num_experts = groups->num_groups;
  groups->slab_rows = static_cast<int32_t>(rows / slabs);
  return Status();
}

Status ReadSizes(const CallFrame& frame, const Operand& sizes, int64_t rows,
                 GroupedGemmParams* params) {
  cuda::gemm::Groups groups{};
  EP_RETURN_IF_ERROR(ReadGroups(frame, sizes, rows, &groups));
  params->num_slabs = static_cast<int32_t>(sizes.dim(0));
  params->slab_rows = groups.slab_rows;
  params->groups_per_slab = groups.groups_per_slab;
  params->group_sizes = groups.sizes;
  return Status();
}

Status ReadScales(const Operand& sizes, const Operand& lhs_scale, const Operand& rhs_scale,
                  GroupedGemmParams* params) {
  const int64_t in = params->in_features, out = params->out_features, experts = params->num_experts;
  const bool by_expert = params->product == GemmProduct::kWeightGrad;
  Dims lhs = sizes.dims();
  Dims rhs = by_expert ? sizes.dims() : Dims{experts};
  if (params->scaling == GemmScaling::kBlock) {
    const int64_t rows = int64_t{params->num_slabs} * params->slab_rows;
    const int64_t contracted = params->product == GemmProduct::kDataGrad ? out : in;
    const int64_t blocks = PaddedRows(*params) / kBlockValues;
    lhs = by_expert ? Dims{blocks, Blocks(in, kBlockValues)}
                    : Dims{rows, Blocks(contracted, kBlockValues)};
    rhs = by_expert ? Dims{blocks, Blocks(out, kBlockValues)}
                    : Dims{experts, Blocks(in, kBlockValues), Blocks(out, kBlockValues)};
  }
  EP_RETURN_IF_ERROR(lhs_scale.Read(lhs, &params->lhs_scale));
  return rhs_scale.Read(rhs, &params->rhs_scale);
}

// Reads the operands that every product has.
Status ReadOperands(const CallFrame& frame, GroupedGemmParams* params) {
  const auto [group_sizes, lhs, rhs] = frame.Args("group_sizes", "lhs", "rhs");
  const auto [out] = frame.Rets("out");
  EP_RETURN_IF_ERROR(lhs.CheckType(DataType::U8));
  EP_RETURN_IF_ERROR(rhs.CheckType(DataType::U8));
  if (!ToFloatType(out.type(), &params->out_type) || params->out_type == FloatType::kF16) {
    return out.MustBe("float32 or bfloat16");
  }
  params->lhs = lhs.data();
  params->rhs = rhs.data();
  params->out = out.data();
  return Status();
}

// ep_fp8_grouped_gemm_v1(group_sizes s32 [S, L], lhs u8 [S * C, K'], rhs u8 [G, N', K'],
//                        lhs_scale f32 [S, L], rhs_scale f32 [G], bias [G, N'] or f32 [0, 0];
//                        data_grad=0, clear_slack, block=0, e5m2: of lhs)
//   -> [S * C, N'] bf16 or f32
//   data_grad=1: lhs [S * C, N'], rhs [G, K', N'], no bias -> [S * C, K']
//   block=1: lhs_scale [S * C, ceil(contracted / 128)], rhs_scale [G, ceil(K'/128), ceil(N'/128)]
Status LaunchProduct(const CallFrame& frame, cudaStream_t stream, int64_t data_grad,
                     int64_t clear_slack, int64_t block, int64_t e5m2) {
  EP_RETURN_IF_ERROR(frame.CheckCount(6, 1));
  const auto [group_sizes, lhs, rhs, lhs_scale, rhs_scale, bias] =
      frame.Args("group_sizes", "lhs", "rhs", "lhs_scale", "rhs_scale", "bias");
  const auto [out] = frame.Rets("out");
  GroupedGemmParams params{};
  params.product = data_grad != 0 ? GemmProduct::kDataGrad : GemmProduct::kForward;
  params.scaling = block != 0 ? GemmScaling::kBlock : GemmScaling::kTensor;
  params.clear_slack = clear_slack != 0;
  params.type = NarrowType(e5m2);
  params.rhs_type = FloatType::kE4M3;
  EP_RETURN_IF_ERROR(ReadOperands(frame, &params));
  const int64_t rows = lhs.dim(0), made = rhs.dim(1), contracted = rhs.dim(2);
  EP_RETURN_IF_ERROR(rhs.CheckShape({rhs.dim(0), made, contracted}));
  EP_RETURN_IF_ERROR(lhs.CheckShape({rows, contracted}));
  EP_RETURN_IF_ERROR(out.CheckShape({rows, made}));
  EP_RETURN_IF_ERROR(ReadSizes(frame, group_sizes, rows, &params));
  SetFeatures(rhs.dim(0), data_grad != 0 ? made : contracted, data_grad != 0 ? contracted : made,
              &params);
  EP_RETURN_IF_ERROR(ReadScales(group_sizes, lhs_scale, rhs_scale, &params));
  EP_RETURN_IF_ERROR(ReadBias(bias, &params));
  return LaunchGemm(frame, stream, params);
}

// ep_fp8_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs u8 [K', S * P], grad u8 [N', S * P],
//                           lhs_scale f32 [S, L], rhs_scale f32 [S, L]; slab_rows=C, block=0,
//                           e5m2: of grad)
//   -> [G, K', N'] bf16 or f32, or for a pair two [G, K', N' / 2]; P is PaddedSlabRows(C, L)
//   block=1: lhs_scale [S * P / 128, ceil(K' / 128)], rhs_scale [S * P / 128, ceil(N' / 128)]
Status LaunchDw(const CallFrame& frame, cudaStream_t stream, int64_t slab_rows, int64_t block,
                int64_t e5m2) {
  EP_RETURN_IF_ERROR(frame.CheckCount(5, CountWeightGrads(frame)));
  const auto [group_sizes, lhs, grad, lhs_scale, rhs_scale] =
      frame.Args("group_sizes", "lhs", "grad", "lhs_scale", "rhs_scale");
  GroupedGemmParams params{};
  params.product = GemmProduct::kWeightGrad;
  params.scaling = block != 0 ? GemmScaling::kBlock : GemmScaling::kTensor;
  params.type = FloatType::kE4M3;
  params.rhs_type = NarrowType(e5m2);
  EP_RETURN_IF_ERROR(ReadOperands(frame, &params));
  const int64_t slabs = group_sizes.dim(0);
  EP_RETURN_IF_ERROR(ReadSizes(frame, group_sizes, slab_rows * slabs, &params));
  const int64_t padded = PaddedRows(params);
  EP_RETURN_IF_ERROR(lhs.CheckShape({lhs.dim(0), padded}));
  EP_RETURN_IF_ERROR(grad.CheckShape({grad.dim(0), padded}));
  EP_RETURN_IF_ERROR(ReadWeightGrads(frame, lhs.dim(0), grad.dim(0), &params));
  EP_RETURN_IF_ERROR(ReadScales(group_sizes, lhs_scale, rhs_scale, &params));
  return LaunchGemm(frame, stream, params);
}

// ep_transpose_rows_v1(group_sizes s32 [S, L], rows u8 or f32 [S * C, width]) -> [width, S * P]
//   Writes only rows in the ranges that FindPaddedRows returns.
template <typename Rows>
Status LaunchRows(const CallFrame& frame, cudaStream_t stream, Rows copy) {
  const auto [group_sizes, rows] = frame.Args("group_sizes", "rows");
  const auto [out] = frame.Rets("out");
  const int64_t width = rows.dim(1), slabs = group_sizes.dim(0);
  EP_RETURN_IF_ERROR(rows.Read({rows.dim(0), width}, &copy.from));
  EP_RETURN_IF_ERROR(ReadGroups(frame, group_sizes, rows.dim(0), &copy.groups));
  const int64_t padded =
      slabs * cuda::gemm::PaddedSlabRows(copy.groups.slab_rows, copy.groups.groups_per_slab);
  EP_RETURN_IF_ERROR(out.Read({width, padded}, &copy.to));
  copy.slabs = static_cast<int32_t>(slabs);
  copy.width = static_cast<int32_t>(width);
  return cuda::Check(cuda::gemm::LaunchTranspose(stream, copy), frame.call);
}

Status LaunchTransposeRows(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(2, 1));
  if (frame.args[1].dtype == DataType::F32) {
    return LaunchRows(frame, stream, cuda::gemm::TransposedFloatRows{});
  }
  return LaunchRows(frame, stream, cuda::gemm::TransposedRows{});
}

// ep_requantize_rows_v1(group_sizes s32 [S, L], rows u8 [S * C, W],
//                       scale f32 [S * C, ceil(W / 128)]; power_of_two, e5m2)
//   -> u8 [W, S * P], f32 [S * P / 128, ceil(W / 128)]
//   Writes only rows in the ranges that FindPaddedRows returns.
Status LaunchRequantizeRows(const CallFrame& frame, cudaStream_t stream, int64_t power_of_two,
                            int64_t e5m2) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 2));
  const auto [group_sizes, rows, scale] = frame.Args("group_sizes", "rows", "scale");
  const auto [out, out_scale] = frame.Rets("out", "out_scale");
  const int64_t width = rows.dim(1), slabs = group_sizes.dim(0);
  cuda::RequantizeRowsParams params{};
  EP_RETURN_IF_ERROR(rows.Read({rows.dim(0), width}, &params.data));
  EP_RETURN_IF_ERROR(scale.Read({rows.dim(0), Blocks(width, kBlockValues)}, &params.scale));
  EP_RETURN_IF_ERROR(ReadGroups(frame, group_sizes, rows.dim(0), &params.groups));
  const int64_t padded =
      slabs * cuda::gemm::PaddedSlabRows(params.groups.slab_rows, params.groups.groups_per_slab);
  EP_RETURN_IF_ERROR(out.Read({width, padded}, &params.out));
  EP_RETURN_IF_ERROR(
      out_scale.Read({padded / kBlockValues, Blocks(width, kBlockValues)}, &params.out_scale));
  params.format = e5m2 != 0 ? cuda::Fp8Format::kE5M2 : cuda::Fp8Format::kE4M3;
  params.slabs = static_cast<int32_t>(slabs);
  params.width = static_cast<int32_t>(width);
  params.power_of_two = power_of_two != 0;
  return cuda::Check(cuda::LaunchRequantizeRows(stream, params), frame.call);
}

// ep_transpose_weights_v1(weights u8 [G, K', N']) -> [G, N', K']
Status LaunchTransposeWeights(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(1, 1));
  const auto [weights] = frame.Args("weights");
  const auto [out] = frame.Rets("out");
  const Dims dims = {weights.dim(0), weights.dim(1), weights.dim(2)};
  cuda::gemm::TransposedPlanes copy{};
  EP_RETURN_IF_ERROR(weights.Read(dims, &copy.from));
  EP_RETURN_IF_ERROR(out.Read({dims[0], dims[2], dims[1]}, &copy.to));
  copy.planes = static_cast<int32_t>(dims[0]);
  copy.lines = static_cast<int32_t>(dims[1]);
  copy.width = static_cast<int32_t>(dims[2]);
  return cuda::Check(cuda::gemm::LaunchTranspose(stream, copy), frame.call);
}

// ep_dequantize_v1(group_sizes s32 [S, L] or [0, 0], data u8 [S, lines, width], scale f32, or e8m0
//                  as u8, [S, ceil(lines / line_values), ceil(width / column_values)];
//                  line_values, column_values, e5m2) -> bf16 like data
//   Rows in no group are not written.
Status LaunchDequantize(const CallFrame& frame, cudaStream_t stream, int64_t line_values,
                        int64_t column_values, int64_t e5m2) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, 1));
  const auto [group_sizes, data, scale] = frame.Args("group_sizes", "data", "scale");
  const auto [out] = frame.Rets("out");
  if (line_values < 1 || column_values < 1) {
    return Refused(frame.call, "line_values", "scales must be of values");
  }
  const int64_t planes = data.dim(0), lines = data.dim(1), width = data.dim(2);
  cuda::gemm::DequantizeParams params{};
  EP_RETURN_IF_ERROR(data.Read(DataType::U8, {planes, lines, width}, &params.data));
  EP_RETURN_IF_ERROR(out.Read(DataType::BF16, data.dims(), &params.out));
  if (!group_sizes.absent(2)) {
    EP_RETURN_IF_ERROR(ReadGroups(frame, group_sizes, planes * lines, &params.groups));
    EP_RETURN_IF_ERROR(group_sizes.CheckShape({planes, group_sizes.dim(1)}));
  }
  params.e8m0 = scale.type() == DataType::U8;
  EP_RETURN_IF_ERROR(scale.Read(params.e8m0 ? DataType::U8 : DataType::F32,
                                {planes, Blocks(lines, line_values), Blocks(width, column_values)},
                                &params.scale));
  params.type = NarrowType(e5m2);
  params.planes = static_cast<int32_t>(planes);
  params.lines = static_cast<int32_t>(lines);
  params.width = static_cast<int32_t>(width);
  params.line_values = static_cast<int32_t>(line_values);
  params.column_values = static_cast<int32_t>(column_values);
  return cuda::Check(cuda::gemm::LaunchDequantize(stream, params), frame.call);
}

}  // namespace

EP_RUNTIME_STREAM_CALL(kFp8GroupedGemmV1, "ep_fp8_grouped_gemm_v1", LaunchProduct,
                       .Attr<int64_t>("data_grad")
                           .Attr<int64_t>("clear_slack")
                           .Attr<int64_t>("block")
                           .Attr<int64_t>("e5m2"));
EP_RUNTIME_STREAM_CALL(kFp8GroupedGemmDwV1, "ep_fp8_grouped_gemm_dw_v1", LaunchDw,
                       .Attr<int64_t>("slab_rows").Attr<int64_t>("block").Attr<int64_t>("e5m2"));
EP_RUNTIME_STREAM_CALL(kRequantizeRowsV1, "ep_requantize_rows_v1", LaunchRequantizeRows,
                       .Attr<int64_t>("power_of_two").Attr<int64_t>("e5m2"));
EP_RUNTIME_STREAM_CALL(kTransposeRowsV1, "ep_transpose_rows_v1", LaunchTransposeRows);
EP_RUNTIME_STREAM_CALL(kTransposeWeightsV1, "ep_transpose_weights_v1", LaunchTransposeWeights);
EP_RUNTIME_STREAM_CALL(
    kDequantizeV1, "ep_dequantize_v1", LaunchDequantize,
    .Attr<int64_t>("line_values").Attr<int64_t>("column_values").Attr<int64_t>("e5m2"));

}  // namespace ep_runtime
