// XLA targets of combine and dispatch's backward over NCCL. `rail_movement.h` explains the letters.

#include <cstdint>
#include <vector>

#include "cuda/nccl/slots.h"
#include "cuda/rows/move_rows.h"
#include "cuda/rows/quantize.h"
#include "cuda/rows/scaled_sums.h"
#include "ffi/nccl/rail_movement.h"

namespace ep_runtime {
namespace {

using nccl::Blocks;

// Sums as 8-bit floats with scales.
struct ScaledRows {
  uint8_t* data;  // [D, T, H] e4m3
  float* scale;   // [D, T, tiles]
};

// Sums this rank's rows of every rank's tokens, sends the sums back, and for this rank's tokens
// adds the sums of all ranks.
struct SumsBack {
  RailSizes sizes;
  cuda::SumRowsParams sum;  // parameters without tokens: rows and weights of the slab
  const int32_t* slot_row;  // [T, D]: index in `arrived` of each rank's sum of a token, or -1
  uint8_t* partials;        // [D, T, row_bytes]
  uint8_t* arrived;         // [D, T, row_bytes]; null if sums are sent as 8-bit floats
  int32_t width;            // H
  ScaledRows scaled, scaled_arrived;
  uint8_t* out;  // [T, row_bytes]

  int64_t tiles() const { return (width + cuda::kTile - 1) / cuda::kTile; }
  Status SumHere(const CudaCall& call, int64_t rank, uint8_t* to) const {
    cuda::SumRowsParams params = sum;
    params.tokens = static_cast<int32_t>(sizes.tokens);
    params.slot_row += rank * sizes.slots();
    params.out = to + rank * sizes.tokens * sizes.row_bytes;
    return call.Launched(cuda::LaunchSumRows(call.stream, params));
  }
  // Converts the sums for `count` ranks to 8-bit floats.
  Status Scale(const CudaCall& call, int64_t rank, int64_t count, const ScaledRows& to) const {
    if (count == 0) return Status();
    const int64_t first = rank * sizes.tokens;
    cuda::QuantizeRowsParams params{};
    params.type = sum.type;
    params.format = cuda::Fp8Format::kE4M3;
    params.groups = {nullptr, 1, 1, static_cast<int32_t>(count * sizes.tokens)};
    params.width = width;
    params.values = partials + first * sizes.row_bytes;
    params.data = to.data + first * width;
    params.tile_scale = to.scale + first * tiles();
    return call.Launched(cuda::LaunchQuantizeRows(call.stream, params));
  }
  // Returns parameters for adding the sums that arrive, as rows or as 8-bit floats.
  template <typename Params>
  Params OfRanks() const {
    Params params{};
    params.type = sum.type;
    params.tokens = static_cast<int32_t>(sizes.tokens);
    params.slots = static_cast<int32_t>(sizes.ranks);
    params.num_rows = static_cast<int32_t>(sizes.ranks * sizes.tokens);
    params.slot_row = slot_row;
    params.out = out;
    return params;
  }
  Status SumScaledRanks(const CudaCall& call) const {
    auto params = OfRanks<cuda::SumScaledRowsParams>();
    params.width = width;
    params.data = scaled_arrived.data;
    params.scale = scaled_arrived.scale;
    return call.Launched(cuda::LaunchSumScaledRows(call.stream, params));
  }
  Status SumRanks(const CudaCall& call) const {
    if (arrived == nullptr) return SumScaledRanks(call);
    auto params = OfRanks<cuda::SumRowsParams>();
    params.row_bytes = sizes.row_bytes;
    params.rows = arrived;
    return call.Launched(cuda::LaunchSumRows(call.stream, params));
  }

  // Like RowsOut::Run, for sums.
  template <typename Meanwhile>
  Status Run(const CudaCall& call, RailCall* rail, std::vector<Blocks> crossing,
             const Meanwhile& meanwhile) const {
    const int64_t me = rail->me(), after = me + 1;
    const bool scales = arrived == nullptr;
    for (int64_t rank = 0; rank < rail->ranks(); ++rank) {
      if (rank != me) EP_RETURN_IF_ERROR(SumHere(call, rank, partials));
    }
    if (scales) {
      EP_RETURN_IF_ERROR(Scale(call, 0, me, scaled));
      EP_RETURN_IF_ERROR(Scale(call, after, rail->ranks() - after, scaled));
      crossing.push_back(sizes.OfTokens(scaled.data, scaled_arrived.data, width));
      crossing.push_back(sizes.OfTokens(scaled.scale, scaled_arrived.scale, 4 * tiles()));
    } else {
      crossing.push_back(sizes.OfTokens(partials, arrived, sizes.row_bytes));
    }
    EP_RETURN_IF_ERROR(rail->Begin(crossing));
    EP_RETURN_IF_ERROR(SumHere(call, me, scales ? partials : arrived));
    if (scales) EP_RETURN_IF_ERROR(Scale(call, me, 1, scaled_arrived));
    EP_RETURN_IF_ERROR(meanwhile());
    EP_RETURN_IF_ERROR(rail->Await());
    return SumRanks(call);
  }
};

// Operands that determine which rows are summed.
struct Places {
  Operand virtual_row, slot_row;

  Status Read(const CudaCall& call, const RailCall& rail, const Operand& rows,
              const Operand& tokens, SumsBack* back) const {
    const int64_t count = slot_row.dim(0), width = rows.dim(1);
    int32_t row_bytes = 0;
    EP_RETURN_IF_ERROR(call.ReadRowBytes(rows, width, &row_bytes));
    EP_RETURN_IF_ERROR(call.ReadSummed(rows, &back->sum.type));
    back->sizes = {rail.ranks(), count, virtual_row.dim(1), rows.dim(0), row_bytes};
    const RailSizes& sizes = back->sizes;
    EP_RETURN_IF_ERROR(rows.Read(rows.type(), {sizes.capacity, width}, &back->sum.rows));
    EP_RETURN_IF_ERROR(virtual_row.Read({sizes.ranks * count, sizes.top_k}, &back->sum.slot_row));
    EP_RETURN_IF_ERROR(slot_row.Read({count, sizes.ranks}, &back->slot_row));
    EP_RETURN_IF_ERROR(tokens.Read(rows.type(), {count, width}, &back->out));
    back->sum.slots = static_cast<int32_t>(sizes.top_k);
    back->sum.num_rows = static_cast<int32_t>(sizes.capacity);
    back->sum.row_bytes = row_bytes;
    back->width = static_cast<int32_t>(width);
    return Status();
  }
};

// Scratch arrays to send and receive sums: two of rows [D, T, H]; or one of rows and two of 8-bit
// sums, each u8 [D, T, H] with f32 [D, T, tiles]. Unused arrays are [0, 0, 0].
struct Crossing {
  Operand partials, arrived, data, scale, data_arrived, scale_arrived;

  Status Read(const Operand& rows, SumsBack* back) const {
    const int64_t ranks = back->sizes.ranks, tokens = back->sizes.tokens;
    const Dims blocks = {ranks, tokens, rows.dim(1)}, scales = {ranks, tokens, back->tiles()};
    const bool scaled = !data.absent(3);
    EP_RETURN_IF_ERROR(partials.Read(rows.type(), blocks, &back->partials));
    EP_RETURN_IF_ERROR(scaled ? arrived.Check(rows.type(), {0, 0, 0})
                              : arrived.Read(rows.type(), blocks, &back->arrived));
    EP_RETURN_IF_ERROR(data.ReadIf(scaled, blocks, &back->scaled.data));
    EP_RETURN_IF_ERROR(scale.ReadIf(scaled, scales, &back->scaled.scale));
    EP_RETURN_IF_ERROR(data_arrived.ReadIf(scaled, blocks, &back->scaled_arrived.data));
    return scale_arrived.ReadIf(scaled, scales, &back->scaled_arrived.scale);
  }
};

// ep_nccl_combine_v1(rank, layer_index, expert_out [C, H], weights f32 [C] or [0], virtual_row,
//                    slot_row s32 [T, D]) -> tokens [T, H], and arrays of a Crossing
Status Combine(const CudaCall& call, RailCall* rail) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(6, 7));
  const auto [rank, layer_index, rows, weights, virtual_row, slot_row] =
      frame.Args("rank", "layer_index", "expert_out", "weights", "virtual_row", "slot_row");
  const auto [tokens, partials, arrived, data, scale, data_arrived, scale_arrived] =
      frame.Rets("tokens", "partials", "arrived", "data", "scale", "data_arrived", "scale_arrived");
  SumsBack back{};
  const Places places{virtual_row, slot_row};
  EP_RETURN_IF_ERROR(places.Read(call, *rail, rows, tokens, &back));
  const Crossing crossing{partials, arrived, data, scale, data_arrived, scale_arrived};
  EP_RETURN_IF_ERROR(crossing.Read(rows, &back));
  EP_RETURN_IF_ERROR(weights.ReadIfGiven({back.sizes.capacity}, &back.sum.weights));
  back.sum.row_weights = true;
  return back.Run(call, rail, {}, [&] { return NoteCall(call, nullptr); });
}

// ep_nccl_dispatch_bwd_v1(rank, layer_index, d_recv [C, H], d_weights f32 [C], virtual_row,
//                         slot_row, dst_rank s32 [T, K])
//   -> d_tokens [T, H], d_topk_weights f32 [T, K], arrays of a Crossing, and f32 [D, T, K] twice
Status DispatchBwd(const CudaCall& call, RailCall* rail) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(7, 10));
  const auto [rank, layer_index, rows, d_weights, virtual_row, slot_row, dst_rank] = frame.Args(
      "rank", "layer_index", "d_recv", "d_weights", "virtual_row", "slot_row", "dst_rank");
  const auto [tokens, d_topk, partials, arrived, data, scale, data_arrived, scale_arrived,
              sent_values, from_ranks] =
      frame.Rets("d_tokens", "d_topk_weights", "partials", "arrived", "data", "scale",
                 "data_arrived", "scale_arrived", "sent_values", "arrived_values");
  SumsBack back{};
  const Places places{virtual_row, slot_row};
  EP_RETURN_IF_ERROR(places.Read(call, *rail, rows, tokens, &back));
  const Crossing crossing{partials, arrived, data, scale, data_arrived, scale_arrived};
  EP_RETURN_IF_ERROR(crossing.Read(rows, &back));
  const RailSizes& sizes = back.sizes;
  const float* of_row = nullptr;
  const int32_t* holder = nullptr;
  float *of_slot = nullptr, *sent = nullptr, *received = nullptr;
  const Dims values = {sizes.ranks, sizes.tokens, sizes.top_k};
  EP_RETURN_IF_ERROR(d_weights.Read({sizes.capacity}, &of_row));
  EP_RETURN_IF_ERROR(dst_rank.Read({sizes.tokens, sizes.top_k}, &holder));
  EP_RETURN_IF_ERROR(d_topk.Read({sizes.tokens, sizes.top_k}, &of_slot));
  EP_RETURN_IF_ERROR(sent_values.Read(values, &sent));
  EP_RETURN_IF_ERROR(from_ranks.Read(values, &received));
  EP_RETURN_IF_ERROR(call.Launched(
      nccl::LaunchToSlots(call.stream, sizes.AllSlots(back.sum.slot_row), of_row, sent)));
  const int64_t own = rail->me() * sizes.slots();
  const std::vector<Blocks> values_too = {sizes.SlotValues(sent, received, /*gathers=*/false)};
  EP_RETURN_IF_ERROR(back.Run(call, rail, values_too, [&]() -> Status {
    EP_RETURN_IF_ERROR(KeepOwn(call, *rail, sizes, sent + own, received));
    return NoteCall(call, nullptr);
  }));
  return call.Launched(nccl::LaunchPickSlots(call.stream, holder, sizes.slots(),
                                             static_cast<int32_t>(sizes.ranks), received, of_slot));
}

}  // namespace

Status LaunchRailCombineCall(const CudaCall& call) {
  return InRail(call, 1, [&](RailCall* rail) { return Combine(call, rail); });
}

Status LaunchRailDispatchBwdCall(const CudaCall& call) {
  return InRail(call, 2, [&](RailCall* rail) { return DispatchBwd(call, rail); });
}

}  // namespace ep_runtime
