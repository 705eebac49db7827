// XLA targets of grouped products.
#include "ffi/gemm/grouped_gemm_ffi_cuda.h"

#include <cstdint>
#include <string>

#include "cuda/gemm/product/groups.h"
#include "ffi/stream_call.h"

namespace ep_runtime {

using cuda::FloatType;
using cuda::GemmProduct;
using cuda::GroupedGemmParams;
using xla::ffi::DataType;

Status LaunchGemm(const CallFrame& frame, cudaStream_t stream, GroupedGemmParams params) {
  params.tuning = cuda::TunedGemm(params);
  return cuda::Check(cuda::LaunchGroupedGemm(stream, params), frame.call);
}

Status ReadWeightGrads(const CallFrame& frame, int64_t in, int64_t out, GroupedGemmParams* params) {
  const bool pair = CountWeightGrads(frame) == 2;
  const auto [first] = frame.Rets("out");
  EP_RETURN_IF_ERROR(first.CheckShape({first.dim(0), in, pair ? out / 2 : out}));
  SetFeatures(first.dim(0), in, out, params);
  if (!pair) return Status();
  const auto [gate, up] = frame.Rets("out", "out_up");
  EP_RETURN_IF_ERROR(up.Check(gate.type(), gate.dims()));
  params->out_up = up.data();
  return Status();
}

Status ReadBias(const Operand& bias, GroupedGemmParams* params) {
  if (bias.absent(2)) return Status();
  EP_RETURN_IF_ERROR(bias.CheckShape({params->num_experts, params->out_features}));
  params->bias = bias.data();
  return bias.ReadFloatType(&params->bias_type);
}

int64_t PaddedRows(const GroupedGemmParams& params) {
  return params.num_slabs * cuda::gemm::PaddedSlabRows(params.slab_rows, params.groups_per_slab);
}

namespace {

// Reads group_sizes [S, L] for slabs of `slab_rows` rows.
Status ReadSizes(const Operand& sizes, int64_t slab_rows, GroupedGemmParams* params) {
  EP_RETURN_IF_ERROR(sizes.Read({sizes.dim(0), sizes.dim(1)}, &params->group_sizes));
  params->num_slabs = static_cast<int32_t>(sizes.dim(0));
  params->slab_rows = static_cast<int32_t>(slab_rows);
  params->groups_per_slab = static_cast<int32_t>(sizes.dim(1));
  return Status();
}

// Reads lhs [S * C, ...], in slabs of equal size, and group_sizes [S, L].
Status ReadRows(const Operand& sizes, const Operand& lhs, GroupedGemmParams* params) {
  const int64_t slabs = sizes.dim(0);
  if (slabs < 1 || lhs.dims().size() != 2 || lhs.dim(0) % slabs != 0) {
    return lhs.MustBe("[S * C, K'] with group_sizes [S, L], got " +
                      std::to_string(lhs.dims().size()) + " dims, the first " +
                      std::to_string(lhs.dim(0)) + ", and S=" + std::to_string(slabs));
  }
  return ReadSizes(sizes, lhs.dim(0) / slabs, params);
}

// Reads types of a product: operands of one type, and a result of that type or f32.
Status ReadTypes(const CallFrame& frame, GroupedGemmParams* params) {
  const auto [group_sizes, lhs, rhs] = frame.Args("group_sizes", "lhs", "rhs");
  const auto [out] = frame.Rets("out");
  EP_RETURN_IF_ERROR(lhs.ReadFloatType(&params->type));
  EP_RETURN_IF_ERROR(rhs.CheckType(lhs.type()));
  EP_RETURN_IF_ERROR(out.ReadFloatType(&params->out_type));
  if (params->out_type != FloatType::kF32) EP_RETURN_IF_ERROR(out.CheckType(lhs.type()));
  params->rhs_type = params->type;
  params->lhs = lhs.data();
  params->rhs = rhs.data();
  params->out = out.data();
  return Status();
}

// ep_grouped_gemm_v1(group_sizes s32 [S, L], lhs [S * C, K'], rhs [G, K', N'],
//                    bias [G, N'] or f32 [0, 0]; data_grad=0, clear_slack) -> [S * C, N']
//   data_grad=1: lhs [S * C, N'], no bias -> [S * C, K']
//   With a fifth operand, rhs and the fifth are a pair, [G, K', N' / 2] each.
//   f32 operands are rounded to tf32. With data_grad=0 they give a second result, [G, N', K']: the
//   transposed weights, which the product multiplies.
Status LaunchProduct(const CallFrame& frame, cudaStream_t stream, int64_t data_grad,
                     int64_t clear_slack) {
  const bool pair = frame.args.size() == 5;
  const bool copies = data_grad == 0 && frame.args[1].dtype == DataType::F32;
  EP_RETURN_IF_ERROR(frame.CheckCount(pair ? 5 : 4, copies ? 2 : 1));
  const auto [group_sizes, lhs, rhs, bias] = frame.Args("group_sizes", "lhs", "rhs", "bias");
  const auto [result] = frame.Rets("out");
  GroupedGemmParams params{};
  params.product = data_grad != 0 ? GemmProduct::kDataGrad : GemmProduct::kForward;
  EP_RETURN_IF_ERROR(ReadRows(group_sizes, lhs, &params));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  if (params.type == FloatType::kF32) params.type = params.rhs_type = FloatType::kTF32;
  const int64_t rows = lhs.dim(0), in = rhs.dim(1), out = rhs.dim(2) * (pair ? 2 : 1);
  EP_RETURN_IF_ERROR(rhs.CheckShape({rhs.dim(0), in, rhs.dim(2)}));
  if (pair) {
    const Operand up(frame.call, "rhs_up", frame.args[4]);
    EP_RETURN_IF_ERROR(up.Check(rhs.type(), rhs.dims()));
    params.rhs_up = up.data();
  }
  if (copies) {
    const auto [product, copy] = frame.Rets("out", "rhs_copy");
    EP_RETURN_IF_ERROR(copy.Check(rhs.type(), {rhs.dim(0), out, in}));
    params.rhs_copy = copy.data();
  }
  EP_RETURN_IF_ERROR(lhs.CheckShape({rows, data_grad != 0 ? out : in}));
  EP_RETURN_IF_ERROR(result.CheckShape({rows, data_grad != 0 ? in : out}));
  SetFeatures(rhs.dim(0), in, out, &params);
  params.clear_slack = clear_slack != 0;
  EP_RETURN_IF_ERROR(ReadBias(bias, &params));
  return LaunchGemm(frame, stream, params);
}

// ep_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs [S * C, K'], grad [S * C, N']) -> [G, K', N'],
//                       or for a pair two [G, K', N' / 2]
Status LaunchDw(const CallFrame& frame, cudaStream_t stream) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, CountWeightGrads(frame)));
  const auto [group_sizes, lhs, grad] = frame.Args("group_sizes", "lhs", "grad");
  GroupedGemmParams params{};
  params.product = GemmProduct::kWeightGrad;
  EP_RETURN_IF_ERROR(ReadRows(group_sizes, lhs, &params));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  EP_RETURN_IF_ERROR(grad.CheckShape({lhs.dim(0), grad.dim(1)}));
  EP_RETURN_IF_ERROR(ReadWeightGrads(frame, lhs.dim(1), grad.dim(1), &params));
  return LaunchGemm(frame, stream, params);
}

// ep_tf32_grouped_gemm_dw_v1(group_sizes s32 [S, L], lhs f32 [K', S * P], grad f32 [N', S * P];
//                            slab_rows=C) -> f32 [G, K', N'], or for a pair two [G, K', N' / 2];
//                            P is PaddedSlabRows(C, L)
Status LaunchTf32Dw(const CallFrame& frame, cudaStream_t stream, int64_t slab_rows) {
  EP_RETURN_IF_ERROR(frame.CheckCount(3, CountWeightGrads(frame)));
  const auto [group_sizes, lhs, grad] = frame.Args("group_sizes", "lhs", "grad");
  GroupedGemmParams params{};
  params.product = GemmProduct::kWeightGrad;
  EP_RETURN_IF_ERROR(ReadSizes(group_sizes, slab_rows, &params));
  EP_RETURN_IF_ERROR(lhs.CheckType(DataType::F32));
  EP_RETURN_IF_ERROR(ReadTypes(frame, &params));
  params.type = params.rhs_type = FloatType::kTF32;
  const int64_t padded = PaddedRows(params);
  EP_RETURN_IF_ERROR(lhs.CheckShape({lhs.dim(0), padded}));
  EP_RETURN_IF_ERROR(grad.CheckShape({grad.dim(0), padded}));
  EP_RETURN_IF_ERROR(ReadWeightGrads(frame, lhs.dim(0), grad.dim(0), &params));
  return LaunchGemm(frame, stream, params);
}

}  // namespace

EP_RUNTIME_STREAM_CALL(kGroupedGemmV1, "ep_grouped_gemm_v1", LaunchProduct,
                       .Attr<int64_t>("data_grad").Attr<int64_t>("clear_slack"));
EP_RUNTIME_STREAM_CALL(kGroupedGemmDwV1, "ep_grouped_gemm_dw_v1", LaunchDw);
EP_RUNTIME_STREAM_CALL(kTf32GroupedGemmDwV1, "ep_tf32_grouped_gemm_dw_v1", LaunchTf32Dw,
                       .Attr<int64_t>("slab_rows"));

}  // namespace ep_runtime
