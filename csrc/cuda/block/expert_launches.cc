// Launches between a block call's exchanges, for operands of every type.
#include "cuda/block/expert_launches.h"

#include "cuda/gemm/grouped_gemm.h"
#include "cuda/movement/copies/copy_experts.h"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/row_dots.h"

namespace ep_runtime {
namespace cuda {
namespace block {

WeightArrays ExpertLaunches::ArraysOf(bool first, const void* one, const void* up,
                                      int64_t value_bytes) const {
  WeightArrays arrays{};
  arrays.count = up == nullptr ? 1 : 2;
  arrays.bytes = int64_t{s_.hidden} * (first ? s_.columns / arrays.count : s_.inner) * value_bytes;
  uint8_t* region = first ? at_.wi_slots : at_.wo_slots;
  for (int i = 0; i < arrays.count; ++i) {
    arrays.home[i] = const_cast<void*>(i == 0 ? one : up);
    arrays.slots[i] = region;
    region += s_.spare * arrays.bytes;
  }
  return arrays;
}

WeightArrays ExpertLaunches::WeightsOf(bool first) const {
  const int64_t bytes = s_.scaling == GemmScaling::kNone ? s_.element_bytes : 1;
  return ArraysOf(first, first ? p_.wi : p_.wo, first ? p_.wi_up : nullptr, bytes);
}

WeightArrays ExpertLaunches::GradsOf(bool first) const {
  WeightArrays arrays = ArraysOf(first, first ? p_.dwi : p_.dwo, first ? p_.dwi_up : nullptr,
                                 BytesOf(p_.weight_type));
  arrays.type = p_.weight_type == FloatType::kF32 ? RowType::kF32 : p_.type;
  return arrays;
}

cudaError_t ExpertLaunches::CopyWeights(cudaStream_t stream, bool first, bool beside) const {
  if (s_.spare == 0) return cudaSuccess;
  return CopyExperts(stream, WeightsOf(first), /*home=*/false, beside);
}

cudaError_t ExpertLaunches::CopyGrads(cudaStream_t stream, bool first, bool beside) const {
  if (s_.spare == 0 || !WantsWeightGrads()) return cudaSuccess;
  return CopyExperts(stream, GradsOf(first), /*home=*/true, beside);
}

cudaError_t ExpertLaunches::CopyExperts(cudaStream_t stream, const WeightArrays& arrays, bool home,
                                        bool beside) const {
  CopyExpertsParams copy{};
  copy.group = p_.group;
  copy.name = p_.name;
  copy.room = p_.room;
  const DispatchGrid& grid = (beside ? p_.beside : p_.alone).dispatch;
  copy.sms = grid.push_blocks + grid.place_blocks;
  copy.local = s_.experts - s_.spare;
  copy.spare = s_.spare;
  copy.experts = p_.copies;
  copy.block_bytes = arrays.bytes;
  copy.home = home;
  copy.type = arrays.type;
  copy.lost = 0xFFFFFFFFu;
  for (int i = 0; i < arrays.count; ++i) {
    copy.from = home ? arrays.slots[i] : arrays.home[i];
    copy.to = home ? arrays.home[i] : arrays.slots[i];
    EP_RETURN_IF_CUDA_ERROR(LaunchCopyExperts(stream, copy, p_.max_tokens));
  }
  return cudaSuccess;
}

GroupedGemmParams ExpertLaunches::ProductOf(GemmProduct product, const PassRows& rows, void* out,
                                            bool first) const {
  GroupedGemmParams gemm{};
  gemm.product = product;
  gemm.num_slabs = 1;
  gemm.slab_rows = s_.rows;
  gemm.groups_per_slab = s_.experts;
  gemm.num_experts = s_.experts;
  gemm.in_features = first ? s_.hidden : s_.inner;
  gemm.out_features = first ? s_.columns : s_.hidden;
  gemm.group_sizes = rows.group_sizes;
  gemm.out = out;
  gemm.wanted = rows.wanted;
  if (s_.spare > 0) {
    const bool grad = product == GemmProduct::kWeightGrad;
    const WeightArrays arrays = grad ? GradsOf(first) : WeightsOf(first);
    gemm.slots = {s_.experts - s_.spare, arrays.slots[0], arrays.slots[1]};
  }
  return gemm;
}

GroupedGemmParams ExpertLaunches::InPlace(GroupedGemmParams gemm, const Hidden& hidden,
                                          bool weighted) const {
  if (ProductActivates(s_)) {
    const bool narrow = s_.scaling != GemmScaling::kNone;
    gemm.activation = {p_.function, weighted ? at_.weights : nullptr,
                       narrow ? at_.q_inner.data : at_.inner, at_.q_inner.scale, p_.power_of_two};
  }
  gemm.slab_rows = hidden.count;
  gemm.bias = p_.wi_bias;
  gemm.bias_type = p_.bias_type;
  gemm.wanted = hidden.wanted;
  return gemm;
}

bool ExpertLaunches::CopiesFit() const {
  return gemm::PaddedSlabRows(s_.rows, s_.experts) == TransposedRowsOf(s_);
}

gemm::Groups ExpertLaunches::CopiedGroups(const PassRows& rows) const {
  return {rows.group_sizes, s_.experts, s_.experts, s_.experts, s_.rows};
}

cudaError_t ExpertLaunches::Multiply(cudaStream_t stream, GroupedGemmParams gemm) {
  gemm.tuning = TunedGemm(gemm);
  return LaunchGroupedGemm(stream, gemm);
}

cudaError_t ExpertLaunches::ActivateBwd(const PassRows& rows, const Hidden& hidden) const {
  auto activation = ActivationOf<ActivationParams>(rows, hidden);
  activation.weights = at_.weights;
  activation.grad = at_.d_inner;
  activation.out = at_.hidden;
  activation.d_weights = at_.d_weights;
  return LaunchActivation(stream_, activation);
}

// y contains sum w * bias, with the bias of wo. So the gradient of the bias is weighted, and the
// gradient of the weights has a term from the bias.
cudaError_t ExpertLaunches::SumBiases(const PassRows& rows) const {
  GroupSumsParams sums{};
  sums.type = p_.type;
  sums.groups = GroupsOf(rows, s_.rows);
  sums.num_experts = s_.experts;
  sums.adds = rows.adds;
  sums.wanted = rows.wanted;
  if (p_.wi_bias != nullptr) {
    sums.width = s_.columns;
    sums.values = at_.hidden;
    sums.sums = p_.d_wi_bias;
    EP_RETURN_IF_CUDA_ERROR(LaunchGroupSums(stream_, sums));
  }
  if (p_.wo_bias == nullptr) return cudaSuccess;
  RowDotsParams dots{};
  dots.type = p_.type;
  dots.groups = sums.groups;
  dots.width = s_.hidden;
  dots.values = at_.grads;
  dots.vectors = p_.wo_bias;
  dots.vector_type = p_.wo_bias_type == FloatType::kF32 ? RowType::kF32 : p_.type;
  dots.dots = at_.d_weights;
  dots.wanted = rows.wanted;
  EP_RETURN_IF_CUDA_ERROR(LaunchRowDots(stream_, dots));
  sums.width = s_.hidden;
  sums.values = at_.grads;
  sums.weights = at_.weights;
  sums.sums = p_.d_wo_bias;
  return LaunchGroupSums(stream_, sums);
}

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime
