// XLA targets of copies of experts on GPUs.
#include <string>

#include "cuda/movement/copies/copy_experts.h"
#include "ffi/cuda_call.h"
#include "ffi/movement/operands.h"

namespace ep_runtime {
namespace {

// Reads experts s32 [N, S] and blocks [L + S, ...], and launches copies to slots or, if `home`, of
// gradients to owners. The result is in the memory of the operand.
Status LaunchCopies(const CudaCall& call, bool home) {
  EP_RETURN_IF_ERROR(call.frame.CheckCount(4, 1));
  const auto [rank, layer_index, experts, from] =
      call.frame.Args("rank", "layer_index", "experts", "from");
  const auto [to] = call.frame.Rets("to");
  const GroupSizes& sizes = call.context.group->sizes();
  const int64_t spare = experts.dim(1), local = sizes.experts_per_rank();
  cuda::CopyExpertsParams params{};
  EP_RETURN_IF_ERROR(experts.Read({sizes.ep_size, spare}, &params.experts));
  if (from.dim(0) != local + spare) {
    return from.MustBe("[" + std::to_string(local + spare) + ", ...], got " +
                       std::to_string(from.dim(0)) + " experts");
  }
  EP_RETURN_IF_ERROR(to.Check(from.type(), from.dims()));
  if (to.data() != from.data()) return to.MustBe("the memory of from");
  if (home && !ToFloatType(from.type(), &params.type)) {
    return from.MustBe("float32, bfloat16 or float16, if gradients are added");
  }
  params.block_bytes = from.element_bytes();
  for (size_t dim = 1; dim < from.dims().size(); ++dim) params.block_bytes *= from.dim(dim);
  params.group = call.rank.group;
  params.name = call.name;
  params.room = call.context.group->lane_layout().room;
  const cuda::ExchangeBlocks& grid = call.group.blocks().alone;
  params.sms = grid.push + grid.place;
  params.local = static_cast<int32_t>(local);
  params.spare = static_cast<int32_t>(spare);
  params.home = home;
  auto* blocks = static_cast<uint8_t*>(to.data());
  uint8_t* slots = blocks + local * params.block_bytes;
  params.from = home ? slots : blocks;
  params.to = home ? blocks : slots;
  params.lost = LostByte(from.type()) * 0x01010101u;
  if (spare < 1 || spare > cuda::kMaxSpare) {
    return experts.MustBe("[N, 1 to " + std::to_string(cuda::kMaxSpare) + "], got " +
                          std::to_string(spare) + " slots");
  }
  if (params.block_bytes % 16 != 0 || !cuda::CopiesFit(params.room, sizes.max_tokens_per_rank)) {
    return from.MustBe(
        "experts of a multiple of 16 bytes in a group whose lanes have 64 KiB for "
        "each source, got experts of " +
        std::to_string(params.block_bytes) + " bytes and lanes of " +
        std::to_string(params.room.bytes));
  }
  return call.Launched(cuda::LaunchCopyExperts(call.stream, params, sizes.max_tokens_per_rank));
}

}  // namespace

// ep_push_copies_v1(rank, layer_index, experts s32 [N, S], from [L + S, ...])
//   -> to, in the memory of `from`: slots get their experts' blocks
Status LaunchPushCopiesCall(const CudaCall& call) { return LaunchCopies(call, /*home=*/false); }

// ep_return_copies_v1(rank, layer_index, experts s32 [N, S], from [L + S, ...])
//   -> to, in the memory of `from`: own experts' blocks get the sums with their copies'; slots are
//      undefined
Status LaunchReturnCopiesCall(const CudaCall& call) { return LaunchCopies(call, /*home=*/true); }

}  // namespace ep_runtime
