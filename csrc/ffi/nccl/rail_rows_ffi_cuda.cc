// XLA targets of dispatch and combine's backward over NCCL. `rail_movement.h` explains the letters.

#include <cstdint>
#include <vector>

#include "cuda/nccl/slots.h"
#include "cuda/rows/move_rows.h"
#include "ffi/nccl/rail_movement.h"

namespace ep_runtime {
namespace {

using nccl::Blocks;

// Sends tokens to all ranks, and places every rank's tokens in the rows of the slab.
struct RowsOut {
  RailSizes sizes;
  cuda::SpreadRowsParams spread;  // parameters without tokens
  const void* tokens;             // [T, row_bytes]
  uint8_t* arrived;               // [D, T, row_bytes]

  Status Place(const CudaCall& call, int64_t rank, const void* from) const {
    cuda::SpreadRowsParams params = spread;
    params.tokens = static_cast<int32_t>(sizes.tokens);
    params.slot_row += rank * sizes.slots();
    params.values = from;
    return call.Launched(cuda::LaunchSpreadRows(call.stream, params));
  }

  // Sends the rows together with the arrays of `crossing`. `meanwhile` launches work that needs no
  // peer.
  template <typename Meanwhile>
  Status Run(const CudaCall& call, RailCall* rail, std::vector<Blocks> crossing,
             const Meanwhile& meanwhile) const {
    crossing.push_back(sizes.OfTokens(tokens, arrived, sizes.row_bytes, /*gathers=*/true));
    EP_RETURN_IF_ERROR(rail->Begin(crossing));
    EP_RETURN_IF_ERROR(Place(call, rail->me(), tokens));
    EP_RETURN_IF_ERROR(meanwhile());
    EP_RETURN_IF_ERROR(rail->Await());
    for (int64_t rank = 0; rank < rail->ranks(); ++rank) {
      const uint8_t* from = arrived + rank * sizes.tokens * sizes.row_bytes;
      if (rank != rail->me()) EP_RETURN_IF_ERROR(Place(call, rank, from));
    }
    return Status();
  }
};

// Operands that determine where rows go: the row of every slot, and the sizes of zones.
struct Zones {
  Operand virtual_row, kept, group_sizes;

  Status Read(const CudaCall& call, const RailCall& rail, const Operand& tokens,
              const Operand& rows, RowsOut* out, nccl::EmptyRowsParams* empty) const {
    const int64_t count = tokens.dim(0), width = tokens.dim(1);
    int32_t row_bytes = 0;
    EP_RETURN_IF_ERROR(call.ReadRowBytes(tokens, width, &row_bytes));
    out->sizes = {rail.ranks(), count, virtual_row.dim(1), rows.dim(0), row_bytes};
    const RailSizes& sizes = out->sizes;
    EP_RETURN_IF_ERROR(tokens.Read(tokens.type(), {count, width}, &out->tokens));
    EP_RETURN_IF_ERROR(virtual_row.Read({sizes.ranks * count, sizes.top_k}, &out->spread.slot_row));
    EP_RETURN_IF_ERROR(rows.Read(tokens.type(), {sizes.capacity, width}, &out->spread.out));
    EP_RETURN_IF_ERROR(kept.Read({kept.dim(0)}, &empty->kept));
    EP_RETURN_IF_ERROR(group_sizes.Read({kept.dim(0)}, &empty->group_sizes));
    out->spread.type = cuda::RowType::kBytes;
    out->spread.rows = static_cast<int32_t>(sizes.capacity);
    out->spread.slots = static_cast<int32_t>(sizes.top_k);
    out->spread.row_bytes = row_bytes;
    empty->experts = static_cast<int32_t>(kept.dim(0));
    empty->capacity = static_cast<int32_t>(sizes.capacity);
    empty->row_bytes = row_bytes;
    empty->rows = out->spread.out;
    return Status();
  }
};

// ep_nccl_dispatch_v1(rank, layer_index, tokens [T, H], weights f32 [T, K] or [0, 0],
//                     virtual_row s32 [D * T, K], recv_count s32 [1, 4], kept s32 [L],
//                     group_sizes s32 [L])
//   -> recv [C, H], recv_weights f32 [C], and as scratch [D, T, H], f32 [D, T, K]
Status Dispatch(const CudaCall& call, RailCall* rail) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(8, 4));
  const auto [rank, layer_index, tokens, weights, virtual_row, recv_count, kept, group_sizes] =
      frame.Args("rank", "layer_index", "tokens", "weights", "virtual_row", "recv_count", "kept",
                 "group_sizes");
  const auto [recv, recv_weights, arrived, arrived_weights] =
      frame.Rets("recv", "recv_weights", "arrived", "arrived_weights");
  RowsOut rows{};
  nccl::EmptyRowsParams empty{};
  const Zones zones{virtual_row, kept, group_sizes};
  EP_RETURN_IF_ERROR(zones.Read(call, *rail, tokens, recv, &rows, &empty));
  const RailSizes& sizes = rows.sizes;
  EP_RETURN_IF_ERROR(
      arrived.Read(tokens.type(), {sizes.ranks, sizes.tokens, tokens.dim(1)}, &rows.arrived));
  const float* given = nullptr;
  float* from_ranks = nullptr;
  const int32_t* counts = nullptr;
  EP_RETURN_IF_ERROR(weights.ReadIfGiven({sizes.tokens, sizes.top_k}, &given));
  EP_RETURN_IF_ERROR(arrived_weights.Read({sizes.ranks, sizes.tokens, sizes.top_k}, &from_ranks));
  EP_RETURN_IF_ERROR(recv_weights.Read({sizes.capacity}, &empty.of_row));
  EP_RETURN_IF_ERROR(recv_count.Read({1, 4}, &counts));
  empty.past_of_row = true;
  std::vector<Blocks> also;
  if (given != nullptr) also.push_back(sizes.SlotValues(given, from_ranks, /*gathers=*/true));
  EP_RETURN_IF_ERROR(rows.Run(call, rail, also, [&]() -> Status {
    if (given != nullptr) EP_RETURN_IF_ERROR(KeepOwn(call, *rail, sizes, given, from_ranks));
    EP_RETURN_IF_ERROR(call.Launched(nccl::LaunchEmptyRows(call.stream, empty)));
    return NoteCall(call, counts);
  }));
  return call.Launched(nccl::LaunchToRows(call.stream, sizes.AllSlots(rows.spread.slot_row),
                                          given == nullptr ? nullptr : from_ranks, empty.of_row));
}

// ep_nccl_combine_bwd_v1(rank, layer_index, g [T, H], expert_out [C, H] or [0, 0],
//                        weights f32 [C] or [0], virtual_row, kept, group_sizes)
//   -> d_expert_out [C, H], d_weights f32 [C], or [0] without expert_out, and [D, T, H]
Status CombineBwd(const CudaCall& call, RailCall* rail) {
  const CallFrame& frame = call.frame;
  EP_RETURN_IF_ERROR(frame.CheckCount(8, 3));
  const auto [rank, layer_index, grad, expert_out, weights, virtual_row, kept, group_sizes] =
      frame.Args("rank", "layer_index", "g", "expert_out", "weights", "virtual_row", "kept",
                 "group_sizes");
  const auto [d_rows, d_weights, arrived] = frame.Rets("d_expert_out", "d_weights", "arrived");
  RowsOut rows{};
  nccl::EmptyRowsParams empty{};
  const Zones zones{virtual_row, kept, group_sizes};
  EP_RETURN_IF_ERROR(zones.Read(call, *rail, grad, d_rows, &rows, &empty));
  const RailSizes& sizes = rows.sizes;
  EP_RETURN_IF_ERROR(
      arrived.Read(grad.type(), {sizes.ranks, sizes.tokens, grad.dim(1)}, &rows.arrived));
  const bool compared = !expert_out.absent(2);
  const bool weighted = !weights.absent(1);
  if (weighted || compared) EP_RETURN_IF_ERROR(call.ReadSummed(grad, &rows.spread.type));
  EP_RETURN_IF_ERROR(weights.ReadIfGiven({sizes.capacity}, &rows.spread.weights));
  rows.spread.row_weights = true;
  if (compared) {
    const Dims slab = {sizes.capacity, grad.dim(1)};
    EP_RETURN_IF_ERROR(expert_out.Read(grad.type(), slab, &rows.spread.others));
  }
  EP_RETURN_IF_ERROR(d_weights.ReadIf(compared, {sizes.capacity}, &rows.spread.products));
  empty.of_row = rows.spread.products;
  empty.past_rows = empty.past_of_row = call.attributes.clear_slack;
  return rows.Run(call, rail, {}, [&]() -> Status {
    EP_RETURN_IF_ERROR(call.Launched(nccl::LaunchEmptyRows(call.stream, empty)));
    return NoteCall(call, nullptr);
  });
}

}  // namespace

Status LaunchRailDispatchCall(const CudaCall& call) {
  return InRail(call, 2, [&](RailCall* rail) { return Dispatch(call, rail); });
}

Status LaunchRailCombineBwdCall(const CudaCall& call) {
  return InRail(call, 2, [&](RailCall* rail) { return CombineBwd(call, rail); });
}

}  // namespace ep_runtime
