// Launches of experts whose products take 8-bit operands.
#include "cuda/block/quantized_experts.h"

#include "cuda/gemm/copies/transpose.h"
#include "cuda/rows/quantize.h"
#include "cuda/rows/requantize_rows.h"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

FloatType ToFloatType(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? FloatType::kE4M3 : FloatType::kE5M2;
}

}  // namespace

cudaError_t QuantizedExperts::PackTokens(const int32_t* wanted, const void* values,
                                         int32_t tokens) const {
  if (!SendsTokens() || s_.packed) return cudaSuccess;
  return Pack(wanted, values, tokens, Fp8Format::kE4M3);
}

cudaError_t QuantizedExperts::PackGrads(const int32_t* wanted, const void* values,
                                        int32_t tokens) const {
  if (!SendsGrads() || s_.packed) return cudaSuccess;
  return Pack(wanted, values, tokens, Gradients());
}

cudaError_t QuantizedExperts::Pack(const int32_t* wanted, const void* values, int32_t tokens,
                                   Fp8Format format) const {
  QuantizeRowsParams quantize{};
  quantize.type = p_.type;
  quantize.format = format;
  quantize.groups = {nullptr, 1, 1, tokens};
  quantize.width = s_.hidden;
  quantize.values = values;
  quantize.power_of_two = p_.power_of_two;
  quantize.data = at_.sent;
  quantize.packed = true;
  quantize.wanted = wanted;
  return LaunchQuantizeRows(stream_, quantize);
}

cudaError_t QuantizedExperts::Forward(const PassRows& rows) const {
  if (!SendsTokens()) {
    EP_RETURN_IF_CUDA_ERROR(Quantize(rows, at_.tokens, s_.hidden, Fp8Format::kE4M3, at_.q_tokens));
  }
  // Only one place is wanted. Activate's q_inner may overlap q_tokens, because that place's product
  // has read them.
  for (int i = 0; i < rows.count; ++i) {
    EP_RETURN_IF_CUDA_ERROR(FirstProduct(rows, rows.places[i], p_.wi, p_.early));
    if (ProductActivates(s_)) continue;
    EP_RETURN_IF_CUDA_ERROR(Activate(rows, rows.places[i], p_.early));
  }
  GroupedGemmParams second =
      Product(GemmProduct::kForward, rows, at_.q_inner, p_.wo, at_.tokens, /*first=*/false);
  second.bias = p_.wo_bias;
  second.bias_type = p_.wo_bias_type;
  return Multiply(second);
}

cudaError_t QuantizedExperts::TakeGrads(const PassRows& rows) const {
  if (SendsGrads()) return cudaSuccess;
  return Quantize(rows, at_.grads, s_.hidden, Gradients(), at_.q_grads);
}

GroupedGemmParams QuantizedExperts::InnerGrad(const PassRows& rows) const {
  return DataGrad(rows, at_.q_grads, at_.d_inner, /*first=*/false);
}

cudaError_t QuantizedExperts::TakeTokens(const PassRows& rows) const {
  if (!SendsTokens()) {
    EP_RETURN_IF_CUDA_ERROR(Quantize(rows, at_.tokens, s_.hidden, Fp8Format::kE4M3, at_.q_tokens));
  }
  for (int i = 0; i < rows.count; ++i) {
    const Hidden& hidden = rows.places[i];
    if (hidden.rows == p_.kept) continue;
    const int32_t own = s_.experts - s_.spare;
    EP_RETURN_IF_CUDA_ERROR(TransposeFirst(hidden.wanted, p_.wi, 0, own));
    if (s_.spare > 0) {
      const void* slots = WeightsOf(/*first=*/true).slots[0];
      EP_RETURN_IF_CUDA_ERROR(TransposeFirst(hidden.wanted, slots, own, s_.spare));
    }
    EP_RETURN_IF_CUDA_ERROR(FirstProduct(rows, hidden, at_.wi, /*weighted=*/true));
  }
  return cudaSuccess;
}

cudaError_t QuantizedExperts::Backward(const PassRows& rows) const {
  for (int i = 0; i < rows.count; ++i) {
    if (ProductActivates(s_) && rows.places[i].rows != p_.kept) continue;
    EP_RETURN_IF_CUDA_ERROR(Activate(rows, rows.places[i], /*weighted=*/true));
  }
  EP_RETURN_IF_CUDA_ERROR(NeedsWide() ? WideHiddenGrads(rows) : HiddenGrads(rows));
  if (WantsWeightGrads()) {
    EP_RETURN_IF_CUDA_ERROR(
        TransposeBoth(rows, at_.q_tokens, s_.hidden, at_.q_hidden, s_.columns, at_.of_first));
  }
  return Multiply(DataGrad(rows, at_.q_hidden, at_.grads, /*first=*/true));
}

GroupedGemmParams QuantizedExperts::FirstWeightGrad(const PassRows& rows) const {
  return WeightGrad(rows, at_.q_tokens, at_.q_hidden, at_.of_first, /*first=*/true);
}

cudaError_t QuantizedExperts::SecondWeightGrad(const PassRows& rows) const {
  if (!WantsWeightGrads()) return cudaSuccess;
  EP_RETURN_IF_CUDA_ERROR(
      TransposeBoth(rows, at_.q_inner, s_.inner, at_.q_grads, s_.hidden, at_.of_second));
  return Multiply(WeightGrad(rows, at_.q_inner, at_.q_grads, at_.of_second, /*first=*/false));
}

// Computes dwo first, because q_hidden overwrites the operands of dwo.
cudaError_t QuantizedExperts::HiddenGrads(const PassRows& rows) const {
  EP_RETURN_IF_CUDA_ERROR(SecondWeightGrad(rows));
  for (int i = 0; i < rows.count; ++i) {
    auto activation = ActivationOf<QuantizedActivationParams>(rows, rows.places[i]);
    activation.weights = at_.weights;
    activation.grad = at_.d_inner;
    activation.d_weights = at_.d_weights;
    activation.format = Gradients();
    EP_RETURN_IF_CUDA_ERROR(Activate(activation, at_.q_hidden));
  }
  return cudaSuccess;
}

// Computes the same bits through wide rows, because gradients of biases are sums of wide rows.
cudaError_t QuantizedExperts::WideHiddenGrads(const PassRows& rows) const {
  for (int i = 0; i < rows.count; ++i) {
    EP_RETURN_IF_CUDA_ERROR(ActivateBwd(rows, rows.places[i]));
  }
  EP_RETURN_IF_CUDA_ERROR(SumBiases(rows));
  EP_RETURN_IF_CUDA_ERROR(SecondWeightGrad(rows));
  return Quantize(rows, at_.hidden, s_.columns, Gradients(), at_.q_hidden);
}

bool QuantizedExperts::NeedsWide() const {
  // The fused kernel's scale tiles end where the gate ends. Tiles of the whole row end there too
  // only if the gate's width is a multiple of a tile.
  const bool tiles = s_.scaling != GemmScaling::kBlock || !p_.gated || s_.inner % kTile == 0;
  return p_.wi_bias != nullptr || p_.wo_bias != nullptr || !tiles;
}

cudaError_t QuantizedExperts::Quantize(const PassRows& rows, const void* values, int32_t width,
                                       Fp8Format format, const QuantizedRows& out) const {
  QuantizeRowsParams quantize{};
  quantize.type = p_.type;
  quantize.format = format;
  quantize.groups = GroupsOf(rows, s_.rows);
  quantize.width = width;
  quantize.values = values;
  quantize.power_of_two = p_.power_of_two;
  quantize.data = out.data;
  quantize.wanted = rows.wanted;
  if (s_.scaling == GemmScaling::kBlock) {
    quantize.tile_scale = out.scale;
    return LaunchQuantizeRows(stream_, quantize);
  }
  const AmaxParams amax{p_.type, quantize.groups, width, s_.experts, values, at_.amax, rows.wanted};
  EP_RETURN_IF_CUDA_ERROR(LaunchGroupAmax(stream_, amax));
  EP_RETURN_IF_CUDA_ERROR(ScalesOf(rows.wanted, format, out.scale));
  quantize.group_scale = out.scale;
  return LaunchQuantizeRows(stream_, quantize);
}

// Computes scales from the amax in the workspace.
cudaError_t QuantizedExperts::ScalesOf(const int32_t* wanted, Fp8Format format,
                                       float* scale) const {
  return LaunchGroupScales(stream_, {format, s_.experts, at_.amax, scale, wanted});
}

cudaError_t QuantizedExperts::FirstProduct(const PassRows& rows, const Hidden& hidden,
                                           const void* wi, bool weighted) const {
  GroupedGemmParams gemm =
      Product(GemmProduct::kForward, rows, at_.q_tokens, wi, hidden.rows, /*first=*/true);
  if (wi == at_.wi) gemm.slots = {};
  return Multiply(InPlace(gemm, hidden, weighted));
}

// Transposes first weights to the workspace, which has all of them in one array.
cudaError_t QuantizedExperts::TransposeFirst(const int32_t* wanted, const void* from, int32_t first,
                                             int32_t experts) const {
  gemm::TransposedPlanes planes{static_cast<const uint8_t*>(from),
                                at_.wi + int64_t{first} * s_.columns * s_.hidden, experts,
                                s_.hidden, s_.columns};
  planes.wanted = wanted;
  return gemm::LaunchTranspose(stream_, planes);
}

cudaError_t QuantizedExperts::Activate(const PassRows& rows, const Hidden& hidden,
                                       bool weighted) const {
  auto activation = ActivationOf<QuantizedActivationParams>(rows, hidden);
  activation.weights = weighted ? at_.weights : nullptr;
  activation.format = Fp8Format::kE4M3;
  return Activate(activation, at_.q_inner);
}

// Quantizes an activation's values or gradients, with scales.
cudaError_t QuantizedExperts::Activate(QuantizedActivationParams activation,
                                       const QuantizedRows& out) const {
  activation.num_experts = s_.experts;
  if (s_.scaling == GemmScaling::kTensor) {
    activation.amax = at_.amax;
    EP_RETURN_IF_CUDA_ERROR(LaunchQuantizedActivation(stream_, activation));
    EP_RETURN_IF_CUDA_ERROR(ScalesOf(activation.wanted, activation.format, out.scale));
    activation.amax = nullptr;
    activation.group_scale = out.scale;
  } else {
    activation.tile_scale = out.scale;
    activation.power_of_two = p_.power_of_two;
  }
  activation.data = out.data;
  return LaunchQuantizedActivation(stream_, activation);
}

// Returns a product of rows by the first or the second weight.
GroupedGemmParams QuantizedExperts::Product(GemmProduct product, const PassRows& rows,
                                            const QuantizedRows& lhs, const void* weight, void* out,
                                            bool first) const {
  GroupedGemmParams gemm = ProductOf(product, rows, out, first);
  gemm.type = FloatType::kE4M3;
  gemm.rhs_type = FloatType::kE4M3;
  gemm.out_type = FloatType::kBF16;
  gemm.scaling = s_.scaling;
  gemm.lhs = lhs.data;
  gemm.lhs_scale = lhs.scale;
  gemm.rhs = weight;
  gemm.rhs_scale = first ? p_.wi_scale : p_.wo_scale;
  if (product != GemmProduct::kForward || p_.shares_sms) {
    gemm.tickets.words = at_.decision->tickets;
  }
  return gemm;
}

GroupedGemmParams QuantizedExperts::DataGrad(const PassRows& rows, const QuantizedRows& grads,
                                             void* out, bool first) const {
  GroupedGemmParams gemm =
      Product(GemmProduct::kDataGrad, rows, grads, first ? p_.wi : p_.wo, out, first);
  gemm.type = ToFloatType(Gradients());
  return gemm;
}

// Transposes both operands, because the tensor cores need a contiguous contracted dim. Sums over
// rows cannot use scales along a row, so block-scaled rows are quantized again.
cudaError_t QuantizedExperts::TransposeBoth(const PassRows& rows, const QuantizedRows& lhs,
                                            int32_t lhs_width, const QuantizedRows& grads,
                                            int32_t grads_width, const Copies& copies) const {
  EP_RETURN_IF_CUDA_ERROR(Turn(rows, lhs, lhs_width, Fp8Format::kE4M3, copies.lhs));
  return Turn(rows, grads, grads_width, Gradients(), copies.grads);
}

GroupedGemmParams QuantizedExperts::WeightGrad(const PassRows& rows, const QuantizedRows& lhs,
                                               const QuantizedRows& grads, const Copies& copies,
                                               bool first) const {
  GroupedGemmParams gemm =
      Product(GemmProduct::kWeightGrad, rows, lhs, nullptr, first ? p_.dwi : p_.dwo, first);
  gemm.rhs_type = ToFloatType(Gradients());
  const bool tensor = s_.scaling == GemmScaling::kTensor;
  gemm.lhs = copies.lhs.data;
  gemm.rhs = copies.grads.data;
  gemm.lhs_scale = tensor ? lhs.scale : copies.lhs.scale;
  gemm.rhs_scale = tensor ? grads.scale : copies.grads.scale;
  gemm.out_type = p_.weight_type;
  gemm.out_up = first ? p_.dwi_up : nullptr;
  gemm.adds = rows.adds;
  return gemm;
}

cudaError_t QuantizedExperts::Turn(const PassRows& rows, const QuantizedRows& from, int32_t width,
                                   Fp8Format format, const Copy& to) const {
  if (!CopiesFit()) return cudaErrorInvalidValue;
  const gemm::Groups groups = CopiedGroups(rows);
  if (s_.scaling == GemmScaling::kTensor) {
    return gemm::LaunchTranspose(
        stream_, gemm::TransposedRows{groups, from.data, to.data, 1, width, rows.wanted});
  }
  return LaunchRequantizeRows(stream_, {format, groups, 1, width, from.data, from.scale,
                                        p_.power_of_two, to.data, to.scale, rows.wanted});
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
