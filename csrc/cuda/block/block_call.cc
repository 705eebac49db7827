// The launches of a block call, one after another on one stream.
//
//   forward, of each pass                         backward, of each pass
//   tokens    <- dispatch x                       tokens  <- dispatch x
//   kept      <- tokens @ wi, or hidden           grads   <- dispatch dy
//   inner     <- activation                       hidden  <- tokens @ wi, where it was not kept
//   tokens    <- inner @ wo                       inner   <- activation, weighted
//   y         <- combine                          d_inner <- grads @ wo^T;  dwo <- inner^T @ grads
//                                                 hidden  <- activation's gradient, and of weights
//                                                 grads   <- hidden @ wi^T; dwi <- tokens^T @
//                                                 hidden dx      <- combine
//
// Passes: one over all tokens by the plan of all of them, where every rank's rows fit the
// workspace; else one over each part of the tokens, by a plan made on the way. A token's sum lies
// in one pass, so that y and dx are the same bits either way; gradients of weights add up, rounded
// once a part. Backward is the same for weights multiplied early and late: y = sum (w * act) @ wo +
// w * bias.

#include "cuda/block/block_call.h"

#include <algorithm>

#include "cuda/block/decide.h"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/movement/prepare/prepare_kernels.h"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/row_dots.h"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

#define EP_RETURN_IF_CUDA_ERROR(launch)                   \
  do {                                                    \
    const cudaError_t launch_error = (launch);            \
    if (launch_error != cudaSuccess) return launch_error; \
  } while (false)

FloatType ToFloatType(RowType type) {
  return type == RowType::kBF16 ? FloatType::kBF16 : FloatType::kF16;
}

Plan Const(const MutablePlan& p) {
  return {p.dst_rank,    p.dst_row, p.recv_count,  p.staged_start, p.staged_row,
          p.staged_slot, p.kept,    p.group_sizes, p.num_recv};
}

// Tokens that go through the experts together.
struct TokenPass {
  const int32_t* wanted;
  Plan plan;
  int32_t begin;  // token
  int32_t tokens;
  bool whole;  // the first product may be kept
  bool adds;   // gradients of weights, to what is there
};

// A pass's first product: where it lies, who makes it.
struct Hidden {
  const int32_t* wanted;
  void* rows;
  int32_t count;  // that there is room for
};

class BlockLaunches {
 public:
  BlockLaunches(cudaStream_t stream, const BlockParams& p, bool backward)
      : stream_(stream), p_(p), s_(p.sizes), backward_(backward) {
    LayOut(s_, backward, p.workspace, &at_);
  }

  cudaError_t Run() {
    const int32_t parts = NumParts(s_), tokens = PartTokens(s_);
    EP_RETURN_IF_CUDA_ERROR(LaunchDecide(stream_, {p_.group, p_.name, s_, parts, p_.most,
                                                   p_.plan.group_sizes, p_.made, at_.decision}));
    EP_RETURN_IF_CUDA_ERROR(RunPass({&at_.decision->whole, p_.plan, 0, s_.tokens, true, false}));
    for (int32_t part = 0; part < parts; ++part) {
      const int32_t begin = part * tokens;
      const TokenPass pass{&at_.decision->parts,
                           Const(at_.plan),
                           begin,
                           std::min(tokens, s_.tokens - begin),
                           false,
                           part > 0};
      EP_RETURN_IF_CUDA_ERROR(PreparePart(pass));
      EP_RETURN_IF_CUDA_ERROR(RunPass(pass));
    }
    return cudaSuccess;
  }

 private:
  cudaError_t RunPass(const TokenPass& pass) { return backward_ ? Backward(pass) : Forward(pass); }

  cudaError_t Forward(const TokenPass& pass) {
    EP_RETURN_IF_CUDA_ERROR(Dispatch(pass));
    Hidden places[2];
    const int count = PlacesOf(pass, places);
    for (int i = 0; i < count; ++i) {
      EP_RETURN_IF_CUDA_ERROR(FirstProduct(pass, places[i]));
      EP_RETURN_IF_CUDA_ERROR(Activate(pass, places[i], p_.early));
    }
    GroupedGemmParams second =
        Product(GemmProduct::kForward, pass, at_.inner, at_.tokens, /*first=*/false);
    second.bias = p_.wo_bias;
    second.bias_type = p_.wo_bias_type;
    EP_RETURN_IF_CUDA_ERROR(Multiply(second));
    return LaunchCombine(stream_, Sums(pass));
  }

  cudaError_t Backward(const TokenPass& pass) {
    EP_RETURN_IF_CUDA_ERROR(Dispatch(pass));
    EP_RETURN_IF_CUDA_ERROR(LaunchCombineBwd(stream_, Grads(pass)));
    Hidden places[2];
    const int count = PlacesOf(pass, places);
    for (int i = 0; i < count; ++i) {
      if (places[i].rows != p_.kept) EP_RETURN_IF_CUDA_ERROR(FirstProduct(pass, places[i]));
      EP_RETURN_IF_CUDA_ERROR(Activate(pass, places[i], /*weighted=*/true));
    }
    EP_RETURN_IF_CUDA_ERROR(
        Multiply(Product(GemmProduct::kDataGrad, pass, at_.grads, at_.d_inner, /*first=*/false)));
    EP_RETURN_IF_CUDA_ERROR(Multiply(WeightGrad(pass, at_.inner, at_.grads, /*first=*/false)));
    for (int i = 0; i < count; ++i) EP_RETURN_IF_CUDA_ERROR(ActivateBwd(pass, places[i]));
    if (p_.wi_bias != nullptr) {
      EP_RETURN_IF_CUDA_ERROR(SumBias(pass, at_.hidden, s_.columns, nullptr, p_.d_wi_bias));
    }
    if (p_.wo_bias != nullptr) EP_RETURN_IF_CUDA_ERROR(SecondBias(pass));
    EP_RETURN_IF_CUDA_ERROR(
        Multiply(Product(GemmProduct::kDataGrad, pass, at_.hidden, at_.grads, /*first=*/true)));
    EP_RETURN_IF_CUDA_ERROR(Multiply(WeightGrad(pass, at_.tokens, at_.hidden, /*first=*/true)));
    return LaunchCombine(stream_, Sums(pass));
  }

  // Where a pass's first product may lie; the device knows which of them it is.
  int PlacesOf(const TokenPass& pass, Hidden places[2]) const {
    if (!pass.whole) {
      places[0] = {pass.wanted, at_.hidden, s_.rows};
      return 1;
    }
    int count = 0;
    if (s_.kept_rows > 0) places[count++] = {&at_.decision->kept, p_.kept, s_.kept_rows};
    // Backward may find that nobody made what is kept.
    const bool holds_all = s_.kept_rows >= s_.rows && p_.made == nullptr;
    if (!holds_all) places[count++] = {&at_.decision->again, at_.hidden, s_.rows};
    return count;
  }

  CallName NameOf(const TokenPass& pass) const {
    CallName name = p_.name;
    name.wanted = pass.wanted;
    return name;
  }
  CallSizes SizesOf(const TokenPass& pass) const {
    return {pass.tokens, s_.top_k, s_.rows, s_.experts, s_.hidden};
  }
  int64_t TokenAt(const TokenPass& pass, int32_t element_bytes) const {
    return int64_t{pass.begin} * s_.hidden * element_bytes;
  }
  int64_t SlotAt(const TokenPass& pass) const { return int64_t{pass.begin} * s_.top_k; }
  const void* TokensOf(const TokenPass& pass, const void* tokens) const {
    return static_cast<const uint8_t*>(tokens) + TokenAt(pass, s_.element_bytes);
  }
  rows::RowGroups GroupsOf(const TokenPass& pass, int32_t count) const {
    return {pass.plan.group_sizes, 1, s_.experts, count};
  }

  cudaError_t PreparePart(const TokenPass& pass) {
    const SlotsParams slots{pass.wanted, p_.topk_idx + SlotAt(pass),
                            p_.plan.dst_rank + SlotAt(pass), pass.tokens * s_.top_k, at_.topk_idx};
    EP_RETURN_IF_CUDA_ERROR(LaunchSlots(stream_, slots));
    PrepareParams prepare{};
    prepare.group = p_.group;
    prepare.name = NameOf(pass);
    prepare.sizes = SizesOf(pass);
    prepare.num_experts = p_.num_experts;
    prepare.alignment = s_.alignment;
    prepare.topk_idx = at_.topk_idx;
    prepare.plan = at_.plan;
    prepare.blocks = p_.prepare_blocks;
    return LaunchPrepare(stream_, prepare);
  }

  // What every exchange of a pass's rows is told alike.
  template <typename Params>
  Params ExchangeOf(const TokenPass& pass) const {
    Params params{};
    params.group = p_.group;
    params.name = NameOf(pass);
    params.sizes = SizesOf(pass);
    params.type = p_.type;
    params.row_bytes = s_.hidden * s_.element_bytes;
    params.plan = pass.plan;
    return params;
  }

  cudaError_t Dispatch(const TokenPass& pass) {
    auto dispatch = ExchangeOf<DispatchParams>(pass);
    dispatch.tokens = TokensOf(pass, p_.tokens);
    dispatch.weights = p_.weights + SlotAt(pass);
    dispatch.recv = at_.tokens;
    dispatch.recv_weights = at_.weights;
    dispatch.grid = p_.dispatch_grid;
    return LaunchDispatch(stream_, dispatch);
  }

  // Gradients of the experts' outputs as they would be without weights: copies of their tokens'.
  CombineBwdParams Grads(const TokenPass& pass) const {
    auto grads = ExchangeOf<CombineBwdParams>(pass);
    grads.grad = TokensOf(pass, p_.dy);
    grads.d_expert_out = at_.grads;
    grads.grid = p_.dispatch_grid;
    grads.clear_slack = false;
    return grads;
  }

  CombineParams Sums(const TokenPass& pass) const {
    auto sums = ExchangeOf<CombineParams>(pass);
    sums.op = backward_ ? OpCode::kDispatchBwd : OpCode::kCombine;
    sums.exact = p_.exact;
    sums.source_rows_bytes = p_.source_rows_bytes;
    sums.rows = backward_ ? at_.grads : at_.tokens;
    sums.weights = backward_ || p_.early ? nullptr : at_.weights;
    sums.grid = p_.combine_grid;
    sums.wide_tokens = p_.wide;
    void* tokens = backward_ ? p_.dx : p_.y;
    sums.tokens = static_cast<uint8_t*>(tokens) + TokenAt(pass, p_.wide ? 4 : s_.element_bytes);
    if (backward_) {
      sums.d_weights = at_.d_weights;
      sums.d_topk_weights = p_.d_weights + SlotAt(pass);
    }
    return sums;
  }

  // A product by the first weight or the second.
  GroupedGemmParams Product(GemmProduct product, const TokenPass& pass, const void* lhs, void* out,
                            bool first) const {
    GroupedGemmParams gemm{};
    gemm.product = product;
    gemm.type = gemm.rhs_type = gemm.out_type = ToFloatType(p_.type);
    gemm.num_slabs = 1;
    gemm.slab_rows = s_.rows;
    gemm.groups_per_slab = s_.experts;
    gemm.num_experts = s_.experts;
    gemm.in_features = first ? s_.hidden : s_.inner;
    gemm.out_features = first ? s_.columns : s_.hidden;
    gemm.group_sizes = pass.plan.group_sizes;
    gemm.lhs = lhs;
    gemm.rhs = first ? p_.wi : p_.wo;
    gemm.rhs_up = first ? p_.wi_up : nullptr;
    gemm.out = out;
    gemm.wanted = pass.wanted;
    return gemm;
  }

  GroupedGemmParams WeightGrad(const TokenPass& pass, const void* lhs, const void* grads,
                               bool first) const {
    GroupedGemmParams gemm =
        Product(GemmProduct::kWeightGrad, pass, lhs, first ? p_.dwi : p_.dwo, first);
    gemm.rhs = grads;
    gemm.rhs_up = nullptr;
    gemm.out_up = first ? p_.dwi_up : nullptr;
    gemm.adds = pass.adds;
    return gemm;
  }

  cudaError_t Multiply(GroupedGemmParams gemm) {
    gemm.tuning = TunedGemm(gemm);
    return LaunchGroupedGemm(stream_, gemm);
  }

  cudaError_t FirstProduct(const TokenPass& pass, const Hidden& hidden) {
    GroupedGemmParams gemm =
        Product(GemmProduct::kForward, pass, at_.tokens, hidden.rows, /*first=*/true);
    gemm.slab_rows = hidden.count;
    gemm.bias = p_.wi_bias;
    gemm.bias_type = p_.bias_type;
    gemm.wanted = hidden.wanted;
    return Multiply(gemm);
  }

  ActivationParams ActivationOf(const TokenPass& pass, const Hidden& hidden) const {
    ActivationParams activation{};
    activation.function = p_.function;
    activation.type = p_.type;
    activation.gated = p_.gated;
    activation.groups = GroupsOf(pass, hidden.count);
    activation.width = s_.inner;
    activation.hidden = hidden.rows;
    activation.wanted = hidden.wanted;
    return activation;
  }

  cudaError_t Activate(const TokenPass& pass, const Hidden& hidden, bool weighted) {
    ActivationParams activation = ActivationOf(pass, hidden);
    activation.weights = weighted ? at_.weights : nullptr;
    activation.out = at_.inner;
    return LaunchActivation(stream_, activation);
  }

  cudaError_t ActivateBwd(const TokenPass& pass, const Hidden& hidden) {
    ActivationParams activation = ActivationOf(pass, hidden);
    activation.weights = at_.weights;
    activation.grad = at_.d_inner;
    activation.out = at_.hidden;
    activation.d_weights = at_.d_weights;
    return LaunchActivation(stream_, activation);
  }

  // The gradient of wo_bias, and what it adds to the weights' as it is weighted: y = sum w * bias.
  cudaError_t SecondBias(const TokenPass& pass) {
    RowDotsParams dots{};
    dots.type = p_.type;
    dots.groups = GroupsOf(pass, s_.rows);
    dots.width = s_.hidden;
    dots.values = at_.grads;
    dots.vectors = p_.wo_bias;
    dots.vector_type = p_.wo_bias_type == FloatType::kF32 ? RowType::kF32 : p_.type;
    dots.dots = at_.d_weights;
    dots.wanted = pass.wanted;
    EP_RETURN_IF_CUDA_ERROR(LaunchRowDots(stream_, dots));
    return SumBias(pass, at_.grads, s_.hidden, at_.weights, p_.d_wo_bias);
  }

  cudaError_t SumBias(const TokenPass& pass, const void* values, int32_t width,
                      const float* weights, float* out) {
    GroupSumsParams sums{};
    sums.type = p_.type;
    sums.groups = GroupsOf(pass, s_.rows);
    sums.width = width;
    sums.num_experts = s_.experts;
    sums.values = values;
    sums.weights = weights;
    sums.sums = out;
    sums.adds = pass.adds;
    sums.wanted = pass.wanted;
    return LaunchGroupSums(stream_, sums);
  }

  cudaStream_t stream_;
  const BlockParams& p_;
  const BlockSizes& s_;
  bool backward_;
  Workspace at_;
};

}  // namespace
}  // namespace block

cudaError_t LaunchBlock(cudaStream_t stream, const BlockParams& params) {
  return block::BlockLaunches(stream, params, /*backward=*/false).Run();
}

cudaError_t LaunchBlockBwd(cudaStream_t stream, const BlockParams& params) {
  return block::BlockLaunches(stream, params, /*backward=*/true).Run();
}

}  // namespace cuda
}  // namespace ep_runtime
