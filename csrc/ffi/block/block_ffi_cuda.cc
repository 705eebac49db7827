// XLA targets of block calls.
#include <cstdint>
#include <string>

#include "cuda/block/block_call.h"
#include "cuda/movement/copies/copy_experts.h"
#include "cuda/rows/quantize.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

using cuda::BlockParams;
using xla::ffi::DataType;

constexpr size_t kFirstPlan = 6;
constexpr size_t kFirstWeight = kFirstPlan + kPlanArrays;
constexpr size_t kForwardArgs = kFirstWeight + 5;

// wi [L, H, N] or, for a pair, [L, H, M]; wi_up [L, H, M] or [0, 0, 0]; wo [L, M, H]; wi_bias [L,
// N] or [0, 0]; copies s32 [N, S] or [0, 0]. If wo has a bias [L, H], it is the last operand. With
// copies, wi, wi_up and wo have L - S experts.
struct WeightOperands {
  Operand wi, wi_up, wo, wi_bias, copies;

  bool pair() const { return !wi_up.absent(3); }
  int64_t columns() const { return wi.dim(2) * (pair() ? 2 : 1); }
  Dims first() const { return {wi.dim(0), wi.dim(1), wi.dim(2)}; }
};

WeightOperands WeightsOf(const CallFrame& frame) {
  const auto [wi, wi_up, wo, wi_bias, copies] =
      frame.Named(frame.args, kFirstWeight, "wi", "wi_up", "wo", "wi_bias", "copies");
  return {wi, wi_up, wo, wi_bias, copies};
}

// Reads wi_bias, [L, N] or absent.
Status ReadFirstBias(const WeightOperands& weights, BlockParams* params) {
  if (weights.wi_bias.absent(2)) return Status();
  EP_RETURN_IF_ERROR(weights.wi_bias.CheckShape({params->sizes.experts, params->sizes.columns}));
  params->wi_bias = weights.wi_bias.data();
  return weights.wi_bias.ReadFloatType(&params->bias_type);
}

Status ReadWeights(const WeightOperands& weights, DataType type, BlockParams* params) {
  const cuda::block::BlockSizes& sizes = params->sizes;
  const int64_t local = sizes.experts - sizes.spare, hidden = sizes.hidden, inner = sizes.inner;
  const int64_t halves = params->gated ? 2 : 1;
  if (weights.columns() != inner * halves || (weights.pair() && !params->gated)) {
    return weights.wi.MustBe("[L, H, " + std::to_string(inner * halves) + "] beside wo [L, " +
                             std::to_string(inner) + ", H], got " +
                             std::to_string(weights.columns()) + " columns");
  }
  EP_RETURN_IF_ERROR(weights.wi.Read(type, {local, hidden, weights.wi.dim(2)}, &params->wi));
  EP_RETURN_IF_ERROR(weights.wo.Read(type, {local, inner, hidden}, &params->wo));
  if (weights.pair()) EP_RETURN_IF_ERROR(weights.wi_up.Read(type, weights.first(), &params->wi_up));
  return ReadFirstBias(weights, params);
}

// Reads `copies`, the expert of each slot of each rank, or [0, 0].
Status ReadCopies(const Operand& copies, const GroupSizes& sizes, BlockParams* params) {
  params->max_tokens = static_cast<int32_t>(sizes.max_tokens_per_rank);
  if (copies.absent(2)) return Status();
  const int64_t spare = copies.dim(1);
  if (spare < 1 || spare > cuda::kMaxSpare || spare >= params->sizes.experts) {
    return copies.MustBe("[N, S] of 1 to " + std::to_string(cuda::kMaxSpare) +
                         " slots, fewer than the " + std::to_string(params->sizes.experts) +
                         " experts, got " + std::to_string(spare));
  }
  params->sizes.spare = static_cast<int32_t>(spare);
  return copies.Read({sizes.ep_size, spare}, &params->copies);
}

int64_t Blocks(int64_t values) { return (values + cuda::kTile - 1) / cuda::kTile; }

// Reads 8-bit weights with a contiguous contracted dim. Their scales are the operands from `scales`
// on: forward wi [L, N, H] and wo [L, H, M], backward wi [L, H, N] and wo [L, M, H].
Status ReadQuantizedWeights(const CallFrame& frame, const WeightOperands& weights, bool backward,
                            size_t scales, BlockParams* params) {
  const cuda::block::BlockSizes& sizes = params->sizes;
  const int64_t local = sizes.experts - sizes.spare, hidden = sizes.hidden, inner = sizes.inner;
  const int64_t columns = sizes.columns;
  if (params->type != cuda::RowType::kBF16) {
    return Refused(frame.call, "tokens", "rows of 8-bit products must be bfloat16");
  }
  const Dims wi = backward ? Dims{local, hidden, columns} : Dims{local, columns, hidden};
  const Dims wo = backward ? Dims{local, inner, hidden} : Dims{local, hidden, inner};
  EP_RETURN_IF_ERROR(weights.wi.Read(DataType::U8, wi, &params->wi));
  EP_RETURN_IF_ERROR(weights.wo.Read(DataType::U8, wo, &params->wo));
  const auto [wi_scale, wo_scale] = frame.Named(frame.args, scales, "wi_scale", "wo_scale");
  const bool blocks = sizes.scaling == cuda::GemmScaling::kBlock;
  const auto of = [&](int64_t in, int64_t out) {
    return blocks ? Dims{sizes.experts, Blocks(in), Blocks(out)} : Dims{sizes.experts};
  };
  EP_RETURN_IF_ERROR(wi_scale.Read(of(hidden, columns), &params->wi_scale));
  EP_RETURN_IF_ERROR(wo_scale.Read(of(inner, hidden), &params->wo_scale));
  return ReadFirstBias(weights, params);
}

cuda::ExchangeGrids GridsOf(const cuda::ExchangeBlocks& blocks) {
  return {{blocks.push, blocks.place}, {blocks.reduce, blocks.sum}};
}

void ReadGroup(const CudaCall& call, BlockParams* params) {
  const GroupOptions& options = call.context.group->options();
  const cuda::LaunchBlocks& blocks = call.group.blocks();
  params->group = call.rank.group;
  params->name = call.name;
  params->num_experts = static_cast<int32_t>(options.sizes.num_experts);
  params->prepare_blocks = blocks.prepare;
  params->alone = GridsOf(blocks.alone);
  params->beside = GridsOf(blocks.beside);
  params->precision = options.combine_precision;
  params->side = call.rank.side;
  params->shares_sms = call.shares_sms;
  params->adds = call.attributes.added > 0;
  params->room = call.context.group->lane_layout().room;
  params->function = static_cast<cuda::ActivationFunction>(call.attributes.function);
  params->gated = call.attributes.gated;
  params->early = call.attributes.early;
  params->gradients = call.attributes.e5m2 ? cuda::Fp8Format::kE5M2 : cuda::Fp8Format::kE4M3;
  params->power_of_two = call.attributes.power_of_two;
}

// Returns the number of operands without wo's bias: the `count` that all calls of a direction have,
// and the scales of 8-bit weights.
size_t CountArgs(const CudaCall& call, size_t count) {
  return count + (call.attributes.scaling != 0 ? 2 : 0);
}

// Returns the type of rows. It is bfloat16 if rows are packed.
DataType RowsTypeOf(const CudaCall& call) {
  const DataType given = call.frame.args[3].dtype;
  return given == DataType::U8 ? DataType::BF16 : given;
}

// Reads rows that are sent, [T, H] of `type` or, if `packed`, u8 [T, QuantizedRowBytes].
Status ReadSent(const Operand& rows, DataType type, bool packed,
                const cuda::block::BlockSizes& sizes, const void** out) {
  if (!packed) return rows.Read(type, {sizes.tokens, sizes.hidden}, out);
  if (!cuda::block::SendsQuantized(sizes)) {
    return rows.MustBe("wide where tokens are not quantized before they are sent");
  }
  return rows.Read(DataType::U8, {sizes.tokens, cuda::block::QuantizedRowBytes(sizes)}, out);
}

// Reads operands that both directions have: rank, layer_index, topk_idx s32 [T, K], tokens [T, H]
// or packed, weights f32 [T, K], most s32 [1], the plan, and the experts' weights. Scales follow
// the first `count` operands.
Status ReadOperands(const CudaCall& call, bool backward, size_t count, BlockParams* params) {
  const CallFrame& frame = call.frame;
  const auto [rank, layer_index, topk_idx, tokens, weights, most] =
      frame.Args("rank", "layer_index", "topk_idx", "tokens", "weights", "most");
  const PlanOperands plan = PlanAt(frame, frame.args, kFirstPlan);
  const WeightOperands experts = WeightsOf(frame);
  const DataType type = RowsTypeOf(call);
  const bool packed = type != tokens.type(), quantized = call.attributes.scaling != 0;
  const int64_t element_bytes = static_cast<int64_t>(xla::ffi::ByteWidth(type));
  // For 8-bit products, forward gets wo transposed.
  const bool transposed = quantized && !backward;
  const Sizes sizes = {tokens.dim(0), topk_idx.dim(1), plan.staged_row.dim(0), plan.kept.dim(0),
                       packed ? experts.wo.dim(transposed ? 1 : 2) : tokens.dim(1)};
  EP_RETURN_IF_ERROR(CheckSizes(frame, call.context, sizes, element_bytes));
  EP_RETURN_IF_ERROR(CheckPlanned(frame, call.context, sizes));
  if (!ToFloatType(type, &params->type) || !ToFloatType(type, &params->weight_type)) {
    return tokens.MustBe("float32, bfloat16 or float16 on NVIDIA GPUs");
  }
  int32_t row_bytes = 0;
  EP_RETURN_IF_ERROR(call.ReadRowBytes(tokens, sizes.width, &row_bytes));
  EP_RETURN_IF_ERROR(topk_idx.Read({sizes.tokens, sizes.top_k}, &params->topk_idx));
  EP_RETURN_IF_ERROR(weights.Read({sizes.tokens, sizes.top_k}, &params->weights));
  EP_RETURN_IF_ERROR(most.Read({1}, &params->most));
  EP_RETURN_IF_ERROR(plan.Read(sizes, call.context.group->lane_layout().room, &params->plan));
  ReadGroup(call, params);
  cuda::block::BlockSizes& block = params->sizes;
  block.tokens = static_cast<int32_t>(sizes.tokens);
  block.top_k = static_cast<int32_t>(sizes.top_k);
  block.capacity = static_cast<int32_t>(sizes.capacity);
  block.experts = static_cast<int32_t>(sizes.experts);
  block.hidden = static_cast<int32_t>(sizes.width);
  block.inner = static_cast<int32_t>(experts.wo.dim(transposed ? 2 : 1));
  block.columns =
      static_cast<int32_t>(quantized ? block.inner * (params->gated ? 2 : 1) : experts.columns());
  block.ranks = static_cast<int32_t>(call.context.group->sizes().ep_size);
  block.alignment = static_cast<int32_t>(call.context.row_alignment);
  block.rows = static_cast<int32_t>(call.attributes.rows);
  block.element_bytes = static_cast<int32_t>(element_bytes);
  block.scaling = static_cast<cuda::GemmScaling>(call.attributes.scaling);
  block.lane_rows = params->room.rows;
  EP_RETURN_IF_ERROR(ReadCopies(experts.copies, call.context.group->sizes(), params));
  if (block.spare > 0 && cuda::block::NumChunks(block) > 0) {
    return experts.copies.MustBe("[0, 0] where rows may not fit the workspace");
  }
  block.packed = packed;
  EP_RETURN_IF_ERROR(ReadSent(tokens, type, packed, block, &params->tokens));
  if (quantized) return ReadQuantizedWeights(frame, experts, backward, count, params);
  return ReadWeights(experts, type, params);
}

// Reads the last operand, if wo has a bias.
Status ReadSecondBias(const CudaCall& call, size_t at, BlockParams* params) {
  if (call.frame.args.size() <= at) return Status();
  const Operand bias(call.frame.call, "wo_bias", call.frame.args[at]);
  if (params->early) return bias.MustBe("absent where weights multiply activations");
  EP_RETURN_IF_ERROR(bias.CheckShape({params->sizes.experts, params->sizes.hidden}));
  if (bias.type() != DataType::F32) EP_RETURN_IF_ERROR(bias.CheckType(RowsTypeOf(call)));
  params->wo_bias = bias.data();
  return bias.ReadFloatType(&params->wo_bias_type);
}

// Reads `kept`, [rows, N] that save the first product, or [0, 0].
Status ReadKept(const Operand& kept, DataType type, BlockParams* params) {
  if (kept.absent(2)) return Status();
  const int64_t rows = kept.dim(0);
  if (rows < 0 || rows > params->sizes.rows) {
    return kept.MustBe("of at most rows=" + std::to_string(params->sizes.rows) + " rows, got " +
                       std::to_string(rows));
  }
  params->sizes.kept_rows = static_cast<int32_t>(rows);
  return kept.Read(type, {rows, params->sizes.columns}, &params->kept);
}

Status ReadWorkspace(const Operand& workspace, bool backward, BlockParams* params) {
  const cuda::block::BlockSizes& sizes = params->sizes;
  if (sizes.rows < sizes.capacity && cuda::block::ChunkTokens(sizes) < 1) {
    return workspace.MustBe("of more than rows=" + std::to_string(sizes.rows) +
                            " rows: not one token of every rank fits");
  }
  cuda::block::Workspace regions;
  const int64_t need = cuda::block::LayOut(sizes, backward, nullptr, &regions);
  EP_RETURN_IF_ERROR(workspace.CheckType(DataType::U8));
  if (workspace.dims().size() != 1 || workspace.dim(0) < need) {
    return workspace.MustBe("u8 of at least " + std::to_string(need) + " bytes, got " +
                            std::to_string(workspace.dim(0)));
  }
  params->workspace = static_cast<uint8_t*>(workspace.data());
  return Status();
}

// Reads the result [T, H], of the tokens' type, or f32 if the tokens' type is narrower and the
// group's sums are f32.
Status ReadTokens(const CudaCall& call, const Operand& tokens, DataType type, void** out,
                  BlockParams* params) {
  params->wide = call.may_widen() && tokens.type() == DataType::F32 && type != DataType::F32;
  return tokens.Read(params->wide ? DataType::F32 : type,
                     {params->sizes.tokens, params->sizes.hidden}, out);
}

// Reads gradients of weights: of the tokens' type or f32. A pair has two arrays for wi. All are
// [0, 0, 0] if the program uses no gradient of weights.
Status ReadWeightGrads(const Operand& dwi, const Operand& dwi_up, const Operand& dwo, DataType type,
                       BlockParams* params) {
  const cuda::block::BlockSizes& sizes = params->sizes;
  if (dwi.absent(3) && dwi_up.absent(3) && dwo.absent(3)) return Status();
  if (dwi.type() == DataType::F32) {
    type = DataType::F32;
    params->weight_type = cuda::FloatType::kF32;
  }
  const bool pair = !dwi_up.absent(3);
  const int64_t local = sizes.experts - sizes.spare;
  const Dims first = {local, sizes.hidden, sizes.columns / (pair ? 2 : 1)};
  EP_RETURN_IF_ERROR(dwi.Read(type, first, &params->dwi));
  EP_RETURN_IF_ERROR(dwi_up.Check(type, pair ? first : Dims{0, 0, 0}));
  if (pair) params->dwi_up = dwi_up.data();
  return dwo.Read(type, {local, sizes.inner, sizes.hidden}, &params->dwo);
}

}  // namespace

// ep_block_v1(rank, layer_index, topk_idx, tokens, weights, most, plan, wi, wi_up, wo, wi_bias,
//             copies [, wo_bias]; rows, function, gated, early, scaling=0, row_alignment=the
//             layer's)
//   -> y [T, H], kept [at most rows, N] or [0, 0], workspace u8
// scaling=1, 2: 8-bit products with tensor scales or block scales. wi and wo are u8, transposed,
//   wi_up is [0, 0, 0], and wi_scale and wo_scale, f32, come before wo_bias; e5m2, power_of_two.
//   Tokens, and dy without wo_bias, may be packed, u8 [T, H + 4 * ceil(H / 128)], if the call
//   would otherwise quantize them itself before sending
Status LaunchBlockCall(const CudaCall& call) {
  const size_t count = CountArgs(call, kForwardArgs);
  const size_t more = call.frame.args.size() > count ? 1 : 0;
  EP_RETURN_IF_ERROR(call.frame.CheckCount(count + more, 3));
  const DataType type = RowsTypeOf(call);
  const auto [y, kept, workspace] = call.frame.Rets("y", "kept", "workspace");
  BlockParams params{};
  EP_RETURN_IF_ERROR(ReadOperands(call, /*backward=*/false, kForwardArgs, &params));
  EP_RETURN_IF_ERROR(ReadSecondBias(call, count, &params));
  EP_RETURN_IF_ERROR(ReadTokens(call, y, type, &params.y, &params));
  EP_RETURN_IF_ERROR(ReadKept(kept, type, &params));
  EP_RETURN_IF_ERROR(ReadWorkspace(workspace, /*backward=*/false, &params));
  return call.Launched(cuda::LaunchBlock(call.stream, params));
}

// ep_block_bwd_v1(operands of ep_block_v1, kept, made s32 [1], dy [T, H] [, wo_bias]; rows,
//                 function, gated, early, scaling=0, row_alignment=the layer's)
//   -> dx [T, H], d_weights f32 [T, K], dwi like wi, dwi_up like wi_up, dwo like wo (or all
//      three [0, 0, 0]), d_wi_bias f32 [L, N] or [0, 0], workspace u8 [, d_wo_bias f32 [L, H]]
// dwi, dwi_up and dwo may be f32
// scaling=1, 2: as above, but wi and wo are not transposed
Status LaunchBlockBwdCall(const CudaCall& call) {
  constexpr size_t kArgs = kForwardArgs + 3;
  const size_t count = CountArgs(call, kArgs);
  const size_t more = call.frame.args.size() > count ? 1 : 0;
  EP_RETURN_IF_ERROR(call.frame.CheckCount(count + more, 7 + more));
  const DataType type = RowsTypeOf(call);
  const auto [kept, made, dy] =
      call.frame.Named(call.frame.args, kForwardArgs, "kept", "made", "dy");
  const auto [dx, d_weights, dwi, dwi_up, dwo, d_wi_bias, workspace] =
      call.frame.Rets("dx", "d_weights", "dwi", "dwi_up", "dwo", "d_wi_bias", "workspace");
  BlockParams params{};
  EP_RETURN_IF_ERROR(ReadOperands(call, /*backward=*/true, kArgs, &params));
  const cuda::block::BlockSizes& sizes = params.sizes;
  EP_RETURN_IF_ERROR(ReadKept(kept, type, &params));
  EP_RETURN_IF_ERROR(made.Read({1}, &params.made));
  EP_RETURN_IF_ERROR(ReadSecondBias(call, count, &params));
  const bool packed = sizes.packed && params.wo_bias == nullptr;
  EP_RETURN_IF_ERROR(ReadSent(dy, type, packed, sizes, &params.dy));
  EP_RETURN_IF_ERROR(ReadTokens(call, dx, type, &params.dx, &params));
  EP_RETURN_IF_ERROR(d_weights.Read({sizes.tokens, sizes.top_k}, &params.d_weights));
  EP_RETURN_IF_ERROR(ReadWeightGrads(dwi, dwi_up, dwo, type, &params));
  EP_RETURN_IF_ERROR(d_wi_bias.ReadIf(params.wi_bias != nullptr, {sizes.experts, sizes.columns},
                                      &params.d_wi_bias));
  if (more != 0) {
    const Operand d_wo_bias(call.frame.call, "d_wo_bias", call.frame.rets[7]);
    EP_RETURN_IF_ERROR(d_wo_bias.Read({sizes.experts, sizes.hidden}, &params.d_wo_bias));
  }
  EP_RETURN_IF_ERROR(ReadWorkspace(workspace, /*backward=*/true, &params));
  return call.Launched(cuda::LaunchBlockBwd(call.stream, params));
}

}  // namespace ep_runtime
