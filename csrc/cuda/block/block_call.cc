// The launches of a block call, one after another on one stream. Brackets hold an exchange and a
// product that do not depend on each other: they overlap if the group's setting allows it and one
// pass processes all tokens.
//
//   forward, of each pass                  backward, of each pass
//   tokens  <- dispatch x                  grads   <- dispatch dy
//   kept    <- tokens @ wi                 [tokens <- dispatch x | d_inner <- grads @ wo^T]
//   inner   <- activation                  hidden  <- tokens @ wi, if it was not saved
//   tokens  <- inner @ wo                  inner   <- activation, weighted
//   y       <- combine                     hidden  <- activation's gradient, and of weights
//                                          dwo     <- inner^T @ grads
//                                          grads   <- hidden @ wi^T
//                                          [dx     <- combine    | dwi <- tokens^T @ hidden]
//
// The kernel of gated first products also computes the activation (see ProductActivates). Then
// forward stores no other product than `kept`.
//
// In brackets, the exchange runs on a side stream. The product's first launch leaves free as many
// SMs as the exchange has blocks, so that either may start first. Its second launch follows the
// exchange on the side stream, on the SMs that are free then. Both launches draw tickets for the
// product's tiles. This cannot deadlock: the product waits for nobody, so the exchange's blocks get
// SMs sooner or later, on every rank. And exchanges of a rank still run one after another, in the
// same order on all ranks, because the side stream joins before the next exchange. The bits of a
// tile do not depend on the block that computes it.
//
// With copies of experts, these exchanges come in addition; 8-bit calls overlap none of them:
//
//   forward                                backward
//   wi's slots before tokens               wo's slots first; wi's too, if `kept` is not given
//   [wo's slots | kept]                    [wi's slots | dwo]
//                                          [dwo home   | dx's product]
//                                          dwi home at the end
//
// For 8-bit products see quantized_experts.h. Products of f32 rows are in tf32: dwo and dwi
// multiply transposed copies of rows, and forward multiplies transposed copies of the weights.
//
// A call makes one pass over all tokens, with the plan of all tokens, if every rank's rows fit the
// workspace. Otherwise it makes one pass over each chunk of the tokens (`part` in code), with a
// plan computed in the call. One pass computes the whole sum of a token, so y and dx have the same
// bits either way. Gradients of weights add up and are rounded once per chunk. Backward is the same
// whether activations (`early`) or outputs are weighted: y = sum (w * act) @ wo + w * bias. For
// frozen weights dwo and dwi are null, and their products are not launched.

#include "cuda/block/block_call.h"

#include <algorithm>

#include "cuda/block/decide.h"
#include "cuda/block/expert_launches.h"
#include "cuda/block/quantized_experts.h"
#include "cuda/gemm/copies/transpose.h"
#include "cuda/movement/prepare/prepare_kernels.h"

namespace ep_runtime {
namespace cuda {
namespace block {
namespace {

FloatType ToFloatType(RowType type) {
  if (type == RowType::kF32) return FloatType::kTF32;
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
  int32_t begin;  // first token
  int32_t tokens;
  bool whole;  // true: all tokens, so the first product may be saved
  bool adds;   // true: gradients of weights are added to earlier passes' sums
};

class BlockLaunches : private ExpertLaunches {
 public:
  BlockLaunches(cudaStream_t stream, const BlockParams& p, const Workspace& at, bool backward)
      : ExpertLaunches(stream, p, at), backward_(backward) {}

  cudaError_t Run() {
    const int32_t chunks = NumChunks(s_), tokens = ChunkTokens(s_);
    EP_RETURN_IF_CUDA_ERROR(LaunchDecide(stream_, {p_.group, p_.name, s_, chunks, p_.most,
                                                   p_.plan.group_sizes, p_.made, at_.decision}));
    EP_RETURN_IF_CUDA_ERROR(RunPass({&at_.decision->whole, p_.plan, 0, s_.tokens, true, p_.adds}));
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t begin = chunk * tokens;
      const bool adds = p_.adds || chunk > 0;
      const TokenPass pass{&at_.decision->chunks,
                           Const(at_.plan),
                           begin,
                           std::min(tokens, s_.tokens - begin),
                           false,
                           adds};
      EP_RETURN_IF_CUDA_ERROR(PrepareChunk(pass));
      EP_RETURN_IF_CUDA_ERROR(RunPass(pass));
    }
    return cudaSuccess;
  }

 private:
  cudaError_t RunPass(const TokenPass& pass) {
    if (s_.scaling != GemmScaling::kNone) return backward_ ? QuantizedBwd(pass) : Quantized(pass);
    return backward_ ? Backward(pass) : Forward(pass);
  }

  // Launches the exchanges of a pass with 8-bit products, and the experts between them.
  cudaError_t Quantized(const TokenPass& pass) {
    const QuantizedExperts experts(stream_, p_, at_);
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/true));
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/false));
    EP_RETURN_IF_CUDA_ERROR(
        experts.PackTokens(pass.wanted, TokensOf(pass, p_.tokens), pass.tokens));
    EP_RETURN_IF_CUDA_ERROR(LaunchDispatch(stream_, SentTokens(pass, p_.alone, experts)));
    EP_RETURN_IF_CUDA_ERROR(experts.Forward(RowsOf(pass)));
    return LaunchCombine(stream_, Sums(pass, p_.alone));
  }

  cudaError_t QuantizedBwd(const TokenPass& pass) {
    const PassRows rows = RowsOf(pass);
    const QuantizedExperts experts(stream_, p_, at_);
    // d_wo_bias sums the wide rows of gradients, which are stored over the tokens' wide rows. So
    // tokens must arrive first.
    const bool tokens_first = p_.wo_bias != nullptr;
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/true));
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/false));
    const auto send_tokens = [&](cudaStream_t stream, const ExchangeGrids& grids) {
      return LaunchDispatch(stream, SentTokens(pass, grids, experts));
    };
    if (tokens_first) {
      EP_RETURN_IF_CUDA_ERROR(
          experts.PackTokens(pass.wanted, TokensOf(pass, p_.tokens), pass.tokens));
      EP_RETURN_IF_CUDA_ERROR(send_tokens(stream_, p_.alone));
      EP_RETURN_IF_CUDA_ERROR(experts.TakeTokens(rows));
    }
    EP_RETURN_IF_CUDA_ERROR(experts.PackGrads(pass.wanted, TokensOf(pass, p_.dy), pass.tokens));
    EP_RETURN_IF_CUDA_ERROR(LaunchCombineBwd(stream_, SentGrads(pass, experts)));
    EP_RETURN_IF_CUDA_ERROR(experts.TakeGrads(rows));
    if (tokens_first) {
      EP_RETURN_IF_CUDA_ERROR(Multiply(experts.InnerGrad(rows)));
    } else {
      EP_RETURN_IF_CUDA_ERROR(
          experts.PackTokens(pass.wanted, TokensOf(pass, p_.tokens), pass.tokens));
      EP_RETURN_IF_CUDA_ERROR(
          RunBeside(pass, send_tokens, BesideDispatch(), experts.InnerGrad(rows)));
      EP_RETURN_IF_CUDA_ERROR(experts.TakeTokens(rows));
    }
    EP_RETURN_IF_CUDA_ERROR(experts.Backward(rows));
    EP_RETURN_IF_CUDA_ERROR(CopyGrads(stream_, /*first=*/false));
    EP_RETURN_IF_CUDA_ERROR(CombineBeside(pass, experts.FirstWeightGrad(rows)));
    return CopyGrads(stream_, /*first=*/true);
  }

  cudaError_t Forward(const TokenPass& pass) {
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/true));
    EP_RETURN_IF_CUDA_ERROR(LaunchDispatch(stream_, Tokens(pass, p_.alone)));
    const PassRows rows = RowsOf(pass);
    for (int i = 0; i < rows.count; ++i) {
      if (i == 0 && s_.spare > 0) {
        EP_RETURN_IF_CUDA_ERROR(CopyBeside(pass, FirstProductOf(rows, rows.places[i], p_.early),
                                           &BlockLaunches::CopyWeights, /*first=*/false));
      } else {
        EP_RETURN_IF_CUDA_ERROR(Multiply(FirstProductOf(rows, rows.places[i], p_.early)));
      }
      if (ProductActivates(s_)) continue;
      EP_RETURN_IF_CUDA_ERROR(Activate(rows, rows.places[i], p_.early));
    }
    GroupedGemmParams second =
        Product(GemmProduct::kForward, rows, at_.inner, at_.tokens, /*first=*/false);
    second.bias = p_.wo_bias;
    second.bias_type = p_.wo_bias_type;
    EP_RETURN_IF_CUDA_ERROR(Multiply(second));
    return LaunchCombine(stream_, Sums(pass, p_.alone));
  }

  cudaError_t Backward(const TokenPass& pass) {
    const PassRows rows = RowsOf(pass);
    const bool saved = rows.count == 1 && rows.places[0].rows == p_.kept;
    EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/false));
    if (!saved || !WantsWeightGrads()) {
      EP_RETURN_IF_CUDA_ERROR(CopyWeights(stream_, /*first=*/true));
    }
    EP_RETURN_IF_CUDA_ERROR(LaunchCombineBwd(stream_, Grads(pass)));
    const auto send_tokens = [&](cudaStream_t stream, const ExchangeGrids& grids) {
      return LaunchDispatch(stream, Tokens(pass, grids));
    };
    EP_RETURN_IF_CUDA_ERROR(
        RunBeside(pass, send_tokens, BesideDispatch(),
                  Product(GemmProduct::kDataGrad, rows, at_.grads, at_.d_inner, /*first=*/false)));
    for (int i = 0; i < rows.count; ++i) {
      const Hidden& hidden = rows.places[i];
      if (hidden.rows != p_.kept) {
        EP_RETURN_IF_CUDA_ERROR(Multiply(FirstProductOf(rows, hidden, /*weighted=*/true)));
        if (ProductActivates(s_)) continue;
      }
      EP_RETURN_IF_CUDA_ERROR(Activate(rows, hidden, /*weighted=*/true));
    }
    for (int i = 0; i < rows.count; ++i) {
      EP_RETURN_IF_CUDA_ERROR(ActivateBwd(rows, rows.places[i]));
    }
    EP_RETURN_IF_CUDA_ERROR(SumBiases(rows));
    if (WantsWeightGrads()) {
      EP_RETURN_IF_CUDA_ERROR(TransposeBoth(rows, /*first=*/false));
      const GroupedGemmParams grad = WeightGrad(rows, /*first=*/false);
      EP_RETURN_IF_CUDA_ERROR(saved && s_.spare > 0
                                  ? CopyBeside(pass, grad, &BlockLaunches::CopyWeights, true)
                                  : Multiply(grad));
      EP_RETURN_IF_CUDA_ERROR(TransposeBoth(rows, /*first=*/true));
    }
    const GroupedGemmParams grad =
        Product(GemmProduct::kDataGrad, rows, at_.hidden, at_.grads, /*first=*/true);
    EP_RETURN_IF_CUDA_ERROR(WantsWeightGrads() && s_.spare > 0
                                ? CopyBeside(pass, grad, &BlockLaunches::CopyGrads, false)
                                : Multiply(grad));
    EP_RETURN_IF_CUDA_ERROR(CombineBeside(pass, WeightGrad(rows, /*first=*/true)));
    return CopyGrads(stream_, /*first=*/true);
  }

  // Copies experts of one weight, or their gradients, while a product runs that does not read them.
  cudaError_t CopyBeside(const TokenPass& pass, GroupedGemmParams gemm,
                         cudaError_t (ExpertLaunches::*copy)(cudaStream_t, bool, bool) const,
                         bool first) {
    const auto exchange = [&](cudaStream_t stream, const ExchangeGrids& grids) {
      return (this->*copy)(stream, first, &grids == &p_.beside);
    };
    gemm.tickets.words = at_.decision->tickets;
    return RunBeside(pass, exchange, BesideDispatch(), gemm);
  }

  int32_t BesideDispatch() const {
    return p_.beside.dispatch.push_blocks + p_.beside.dispatch.place_blocks;
  }
  cudaError_t CombineBeside(const TokenPass& pass, const GroupedGemmParams& gemm) {
    if (!WantsWeightGrads()) return LaunchCombine(stream_, Sums(pass, p_.alone));
    const auto combine = [&](cudaStream_t stream, const ExchangeGrids& grids) {
      return LaunchCombine(stream, Sums(pass, grids));
    };
    const CombineGrid& beside = p_.beside.combine;
    return RunBeside(pass, combine, beside.reduce_blocks + beside.sum_blocks, gemm);
  }

  // Launches an exchange and a product that do not depend on each other. If the two overlap, the
  // exchange has `blocks` blocks.
  template <typename Exchange>
  cudaError_t RunBeside(const TokenPass& pass, const Exchange& exchange, int32_t blocks,
                        GroupedGemmParams gemm) {
    const auto even = [](int32_t count) { return count / 2 * 2; };
    const int32_t rest = p_.side == nullptr ? 0 : even(p_.side->processors() - blocks);
    // With fewer SMs the product would take longer than both one after another. Chunks do not
    // overlap either: they are rare, and their unused launches cost every call time.
    if (rest < blocks || !pass.whole) {
      EP_RETURN_IF_CUDA_ERROR(exchange(stream_, p_.alone));
      return Multiply(stream_, gemm);
    }
    Fork fork(p_.side, stream_);
    EP_RETURN_IF_CUDA_ERROR(fork.error());
    EP_RETURN_IF_CUDA_ERROR(exchange(fork.side(), p_.beside));
    gemm.tickets.blocks = rest;
    gemm.tickets.all_blocks = rest + even(blocks);
    EP_RETURN_IF_CUDA_ERROR(Multiply(stream_, gemm));
    gemm.tickets.blocks = even(blocks);
    EP_RETURN_IF_CUDA_ERROR(Multiply(fork.side(), gemm));
    return fork.Join();
  }

  PassRows RowsOf(const TokenPass& pass) const {
    PassRows rows{pass.wanted, pass.plan.group_sizes, pass.adds, {}, 0};
    if (!pass.whole) {
      rows.places[rows.count++] = {pass.wanted, at_.hidden, s_.rows};
      return rows;
    }
    if (s_.kept_rows > 0) {
      rows.places[rows.count++] = {&at_.decision->kept, p_.kept, s_.kept_rows};
    }
    // Backward also needs this place if forward did not fill `kept`.
    const bool holds_all = s_.kept_rows >= s_.rows && p_.made == nullptr;
    if (!holds_all) rows.places[rows.count++] = {&at_.decision->again, at_.hidden, s_.rows};
    return rows;
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
  cudaError_t PrepareChunk(const TokenPass& pass) {
    const SlotsParams slots{pass.wanted, p_.topk_idx + SlotAt(pass),
                            p_.plan.dst_rank + SlotAt(pass), pass.tokens * s_.top_k, at_.topk_idx};
    EP_RETURN_IF_CUDA_ERROR(LaunchSlots(stream_, slots));
    PrepareParams prepare{};
    prepare.group = p_.group;
    prepare.name = NameOf(pass);
    prepare.sizes = SizesOf(pass);
    prepare.num_experts = p_.num_experts;
    prepare.alignment = prepare.row_alignment = s_.alignment;
    prepare.topk_idx = at_.topk_idx;
    prepare.plan = at_.plan;
    prepare.blocks = p_.prepare_blocks;
    prepare.room = p_.room;
    return LaunchPrepare(stream_, prepare);
  }

  // Returns parameters with the fields that all exchanges of a pass share.
  template <typename Params>
  Params ExchangeOf(const TokenPass& pass) const {
    Params params{};
    params.group = p_.group;
    params.name = NameOf(pass);
    params.sizes = SizesOf(pass);
    params.type = p_.type;
    params.row_bytes = s_.hidden * s_.element_bytes;
    params.plan = pass.plan;
    params.room = p_.room;
    return params;
  }

  DispatchParams Tokens(const TokenPass& pass, const ExchangeGrids& grids) const {
    auto dispatch = ExchangeOf<DispatchParams>(pass);
    dispatch.tokens = TokensOf(pass, p_.tokens);
    dispatch.weights = p_.weights + SlotAt(pass);
    dispatch.recv = at_.tokens;
    dispatch.recv_weights = at_.weights;
    dispatch.grid = grids.dispatch;
    return dispatch;
  }

  // Returns the dispatch of the gradients of the experts' outputs, without weights: copies of the
  // tokens' gradients.
  CombineBwdParams Grads(const TokenPass& pass) const {
    auto grads = ExchangeOf<CombineBwdParams>(pass);
    grads.grad = TokensOf(pass, p_.dy);
    grads.d_expert_out = at_.grads;
    grads.grid = p_.alone.dispatch;
    grads.clear_slack = false;
    return grads;
  }

  // Parameters of tokens and gradients as 8-bit operands, if these are quantized before they are
  // sent.
  DispatchParams SentTokens(const TokenPass& pass, const ExchangeGrids& grids,
                            const QuantizedExperts& experts) const {
    DispatchParams dispatch = Tokens(pass, grids);
    if (!experts.SendsTokens()) return dispatch;
    dispatch.tokens = PackedOf(pass, p_.tokens);
    dispatch.recv = at_.q_tokens.data;
    dispatch.recv_scale = at_.q_tokens.scale;
    SendPacked(&dispatch);
    return dispatch;
  }
  CombineBwdParams SentGrads(const TokenPass& pass, const QuantizedExperts& experts) const {
    CombineBwdParams grads = Grads(pass);
    if (!experts.SendsGrads()) return grads;
    grads.grad = PackedOf(pass, p_.dy);
    grads.d_expert_out = at_.q_grads.data;
    grads.d_scale = at_.q_grads.scale;
    SendPacked(&grads);
    return grads;
  }
  const void* PackedOf(const TokenPass& pass, const void* given) const {
    if (!s_.packed) return at_.sent;
    return static_cast<const uint8_t*>(given) + pass.begin * QuantizedRowBytes(s_);
  }
  template <typename Params>
  void SendPacked(Params* params) const {
    params->type = RowType::kBytes;
    params->row_bytes = static_cast<int32_t>(QuantizedRowBytes(s_));
    params->scale_bytes = params->row_bytes - s_.hidden;
  }

  CombineParams Sums(const TokenPass& pass, const ExchangeGrids& grids) const {
    auto sums = ExchangeOf<CombineParams>(pass);
    sums.op = backward_ ? OpCode::kDispatchBwd : OpCode::kCombine;
    sums.precision = p_.precision;
    sums.rows = backward_ ? at_.grads : at_.tokens;
    sums.weights = backward_ || p_.early ? nullptr : at_.weights;
    sums.grid = grids.combine;
    sums.wide_tokens = p_.wide;
    void* tokens = backward_ ? p_.dx : p_.y;
    sums.tokens = static_cast<uint8_t*>(tokens) + TokenAt(pass, p_.wide ? 4 : s_.element_bytes);
    if (backward_) {
      sums.d_weights = at_.d_weights;
      sums.d_topk_weights = p_.d_weights + SlotAt(pass);
    }
    return sums;
  }

  GroupedGemmParams Product(GemmProduct product, const PassRows& rows, const void* lhs, void* out,
                            bool first) const {
    GroupedGemmParams gemm = ProductOf(product, rows, out, first);
    gemm.type = gemm.rhs_type = ToFloatType(p_.type);
    gemm.out_type = p_.type == RowType::kF32 ? FloatType::kF32 : gemm.type;
    gemm.lhs = lhs;
    gemm.rhs = first ? p_.wi : p_.wo;
    gemm.rhs_up = first ? p_.wi_up : nullptr;
    if (product == GemmProduct::kForward) gemm.rhs_copy = at_.weights_32;
    // Tickets also help a launch on all SMs: they save 2 to 5% of a backward call. Where other
    // kernels hold SMs, blocks that get none leave their tiles to others.
    if (product != GemmProduct::kForward || p_.shares_sms) {
      gemm.tickets.words = at_.decision->tickets;
    }
    return gemm;
  }

  // Operands of a weight gradient: rows [W, ...], or transposed copies of rows.
  struct GradOperands {
    const void* lhs;
    const void* grads;
  };
  GradOperands RowsOfBoth(bool first) const {
    return first ? GradOperands{at_.tokens, at_.hidden} : GradOperands{at_.inner, at_.grads};
  }
  const Copies& CopiesOf(bool first) const { return first ? at_.of_first : at_.of_second; }

  cudaError_t TransposeBoth(const PassRows& rows, bool first) const {
    if (!TransposesRows(s_)) return cudaSuccess;
    const GradOperands from = RowsOfBoth(first);
    const Copies& to = CopiesOf(first);
    EP_RETURN_IF_CUDA_ERROR(Turn(rows, from.lhs, first ? s_.hidden : s_.inner, to.lhs));
    return Turn(rows, from.grads, first ? s_.columns : s_.hidden, to.grads);
  }
  cudaError_t Turn(const PassRows& rows, const void* from, int32_t width, const Copy& to) const {
    if (!CopiesFit()) return cudaErrorInvalidValue;
    return gemm::LaunchTranspose(
        stream_,
        gemm::TransposedFloatRows{CopiedGroups(rows), static_cast<const float*>(from),
                                  reinterpret_cast<float*>(to.data), 1, width, rows.wanted});
  }

  GroupedGemmParams WeightGrad(const PassRows& rows, bool first) const {
    const Copies& copies = CopiesOf(first);
    const GradOperands operands =
        TransposesRows(s_) ? GradOperands{copies.lhs.data, copies.grads.data} : RowsOfBoth(first);
    GroupedGemmParams gemm =
        Product(GemmProduct::kWeightGrad, rows, operands.lhs, first ? p_.dwi : p_.dwo, first);
    gemm.rhs = operands.grads;
    gemm.rhs_up = nullptr;
    gemm.out_up = first ? p_.dwi_up : nullptr;
    gemm.out_type = p_.weight_type;
    gemm.adds = rows.adds;
    return gemm;
  }

  GroupedGemmParams FirstProductOf(const PassRows& rows, const Hidden& hidden,
                                   bool weighted) const {
    return InPlace(Product(GemmProduct::kForward, rows, at_.tokens, hidden.rows, /*first=*/true),
                   hidden, weighted);
  }

  cudaError_t Activate(const PassRows& rows, const Hidden& hidden, bool weighted) const {
    auto activation = ActivationOf<ActivationParams>(rows, hidden);
    activation.weights = weighted ? at_.weights : nullptr;
    activation.out = at_.inner;
    return LaunchActivation(stream_, activation);
  }

  bool backward_;
};

cudaError_t Launch(cudaStream_t stream, const BlockParams& params, bool backward) {
  Workspace at;
  LayOut(params.sizes, backward, params.workspace, &at);
  EP_RETURN_IF_CUDA_ERROR(BlockLaunches(stream, params, at, backward).Run());
  return LaunchEnd(stream, params, backward);
}

}  // namespace
}  // namespace block

cudaError_t LaunchBlock(cudaStream_t stream, const BlockParams& params) {
  return block::Launch(stream, params, /*backward=*/false);
}

cudaError_t LaunchBlockBwd(cudaStream_t stream, const BlockParams& params) {
  return block::Launch(stream, params, /*backward=*/true);
}

}  // namespace cuda
}  // namespace ep_runtime
