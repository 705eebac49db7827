// XLA targets of block calls beside which arrays cross between nodes: the next tokens come, and the
// last sums return, while the experts multiply.
//
// One handler begins and ends the exchange, so XLA sees no memory in use between two calls, and
// calls of a communicator keep their order on all ranks.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/device/driver.h"
#include "ffi/nccl/rail_call.h"

namespace ep_runtime {
namespace {

constexpr int32_t kMaxChannels = 64;  // blocks of an NCCL kernel, in any version of NCCL

// Whether an exchange's blocks, which wait for each other, all find SMs beside NCCL's. If some did
// not, nodes could wait for each other in a circle.
bool Overlaps(const CudaCall& call) {
  if (call.rank.side == nullptr) return false;
  const cuda::ExchangeBlocks& alone = call.group.blocks().alone;
  const int32_t blocks = std::max(
      {alone.push + alone.place, alone.reduce + alone.sum, call.group.blocks().prepare + 1});
  return blocks + kMaxChannels <= call.rank.side->processors();
}

// Gradients of weights and biases among the results of a backward call.
constexpr size_t kWeightGrads[] = {2, 3, 4, 5, 7};

// Gives the results to which gradients are added their first values, the operands after those of
// `block`. Both are the same memory, unless XLA put the call into a fusion.
Status StartSums(const CudaCall& call, const CallFrame& block) {
  size_t at = block.args.size();
  const size_t end = at + static_cast<size_t>(call.attributes.added);
  for (size_t i : kWeightGrads) {
    if (at == end || i >= block.rets.size() || block.rets[i].bytes() == 0) continue;
    const Operand sums(call.frame.call, "sums", call.frame.args[at++]);
    const Buffer& result = block.rets[i];
    EP_RETURN_IF_ERROR(sums.Check(result.dtype, result.dims));
    if (sums.data() == result.data) continue;
    EP_RETURN_IF_CUDA(cudaMemcpyAsync(result.data, sums.data(), result.bytes(),
                                      cudaMemcpyDeviceToDevice, call.stream));
  }
  return at == end ? Status() : OtherVersion(call.frame.call, "the program adds to no gradient");
}

// Starts sending the last arrays of the call, as many as it has results after the first `results`.
Status BeginCrossing(const CallFrame& frame, size_t results, RailCall* rail) {
  const size_t count = frame.rets.size() - results, given = frame.args.size() - count;
  const Operand counts(frame.call, "counts", frame.args[given - 1]);
  const bool counted = !counts.absent(2);
  std::vector<nccl::Blocks> blocks(counted ? 0 : count);
  CountedArrays tokens(rail->peers()), sums(rail->peers());
  for (size_t i = 0; i < count; ++i) {
    const Operand array(frame.call, "crossing", frame.args[given + i]);
    const Operand result(frame.call, "crossed", frame.rets[results + i]);
    const bool gathers = result.dims().size() > array.dims().size();
    EP_RETURN_IF_ERROR(counted ? (gathers ? tokens : sums).Add(array, result)
                               : ReadBlocks(array, result, rail->ranks(), gathers, &blocks[i]));
  }
  if (!counted) return rail->Begin(blocks, /*own=*/true);
  const int32_t* on_device = nullptr;
  EP_RETURN_IF_ERROR(counts.Read({4, rail->ranks()}, &on_device));
  return rail->BeginCounted(on_device, &tokens, &sums);
}

// Runs `launch` on the frame `block` while the arrays after it in `call` cross.
template <typename Launch>
Status RunBeside(const CudaCall& call, const CallFrame& block, RailCall* rail,
                 const Launch& launch) {
  EP_RETURN_IF_ERROR(StartSums(call, block));
  EP_RETURN_IF_ERROR(BeginCrossing(call.frame, block.rets.size(), rail));
  const bool overlaps = Overlaps(call);
  if (!overlaps) EP_RETURN_IF_ERROR(rail->Await());
  EP_RETURN_IF_ERROR(launch(CudaCall{block, call.context, call.group, call.rank, call.name,
                                     call.stream, call.attributes, call.run, overlaps}));
  return rail->Await();
}

template <typename Launch>
Status LaunchBeside(const CudaCall& call, const Launch& launch) {
  const auto crossing = static_cast<size_t>(call.attributes.crossing);
  const size_t more = crossing + 1 + static_cast<size_t>(call.attributes.added);
  if (crossing < 1 || call.frame.args.size() < more || call.frame.rets.size() < crossing) {
    return OtherVersion(call.frame.call, "the program gives fewer arrays than cross");
  }
  CallFrame block = call.frame;
  block.args.resize(block.args.size() - more);
  block.rets.resize(block.rets.size() - crossing);
  RailCall rail;
  Status status = rail.Open(call, call.attributes.node_size);
  if (status.ok()) status = RunBeside(call, block, &rail, launch);
  return rail.End(call, block.rets.size(), call.frame.rets.size(), status);
}

}  // namespace

// ep_nccl_block_v1(operands of ep_block_v1, counts, arrays ...; crossing=their number, node_size)
//   -> results of ep_block_v1, arrays ... [D, ...]: block m is from the same local rank of node m.
//      An array [D, ...] sends block m there; one without D sends all of it to every node.
// With counts s32 [4, D], else [0, 0], only counted rows cross, as `CountedArrays` explains. Arrays
// [N, X] arrive as blocks [D, R, X]; counts[0] of their rows are sent, counts[1] received. Blocks
// arrive lined up, by counts[2] and counts[3]. The host waits for the counts.
Status LaunchRailBlockCall(const CudaCall& call) { return LaunchBeside(call, LaunchBlockCall); }

// ep_nccl_block_bwd_v1(operands of ep_block_bwd_v1, sums ..., counts, arrays ...; crossing,
//                      node_size, added=the number of sums)
//   -> results of ep_block_bwd_v1, arrays ...
// With `added` > 0, gradients of weights and biases are added to the sums, in the order of the
// results that are not empty. Gradients of weights are f32 then.
Status LaunchRailBlockBwdCall(const CudaCall& call) {
  return LaunchBeside(call, LaunchBlockBwdCall);
}

}  // namespace ep_runtime
