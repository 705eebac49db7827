// Launches between a block call's exchanges, for operands of every type.
#include "cuda/block/expert_launches.h"

#include "cuda/gemm/grouped_gemm.h"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/row_dots.h"

namespace ep_runtime {
namespace cuda {
namespace block {

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
  return gemm;
}

GroupedGemmParams ExpertLaunches::InPlace(GroupedGemmParams gemm, const Hidden& hidden) const {
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
