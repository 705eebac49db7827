// Moves rows in groups with one rank per node. Rows do not go through windows, so kernels that use
// the whole GPU place and sum rows. One exchange sends all rows, while work that needs no peer
// runs. Splitting the exchange, to overlap the kernels of one part with the exchange of the next,
// took as long on the device, and longer on the host, which calls NCCL for each part.
//
// Letters: T tokens of K slots, H hidden, C rows of the slab, L experts, D ranks; `virtual_row` [D
// * T, K] is the row on this rank of every slot of every rank's tokens, or -1.
#ifndef EP_RUNTIME_FFI_NCCL_RAIL_MOVEMENT_H_
#define EP_RUNTIME_FFI_NCCL_RAIL_MOVEMENT_H_

#include <cstdint>

#include "cuda/movement/call/note_call.h"
#include "cuda/nccl/slots.h"
#include "ffi/cuda_call.h"
#include "ffi/nccl/rail_call.h"

namespace ep_runtime {

// Sizes that all calls of this file have.
struct RailSizes {
  int64_t ranks, tokens, top_k, capacity, row_bytes;

  int64_t slots() const { return tokens * top_k; }
  nccl::Slots AllSlots(const int32_t* row) const {
    return {row, ranks * slots(), static_cast<int32_t>(capacity)};
  }
  // Returns blocks with `bytes` bytes for every token of a rank.
  nccl::Blocks OfTokens(const void* sent, void* received, int64_t bytes,
                        bool gathers = false) const {
    return {static_cast<const uint8_t*>(sent), static_cast<uint8_t*>(received), tokens * bytes,
            gathers};
  }
  nccl::Blocks SlotValues(const float* sent, float* received, bool gathers) const {
    return {reinterpret_cast<const uint8_t*>(sent), reinterpret_cast<uint8_t*>(received),
            slots() * 4, gathers};
  }
};

// Reports the call on the group's board.
inline Status NoteCall(const CudaCall& call, const int32_t* recv_count) {
  return call.Launched(
      cuda::LaunchNoteCall(call.stream, call.rank.group, call.name, call.frame.op, recv_count));
}

// Copies a rank's own values to their place among the values that arrive.
inline Status KeepOwn(const CudaCall& call, const RailCall& rail, const RailSizes& sizes,
                      const float* own, float* arrived) {
  return call.Launched(cudaMemcpyAsync(arrived + rail.me() * sizes.slots(), own, sizes.slots() * 4,
                                       cudaMemcpyDeviceToDevice, call.stream));
}

// Opens a RailCall for the call, runs `make` with it, and ends it.
template <typename Make>
Status InRail(const CudaCall& call, size_t results, const Make& make) {
  RailCall rail;
  Status status = rail.Open(call, /*node_size=*/1);
  if (status.ok()) status = make(&rail);
  return rail.End(call, 0, results, status);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_RAIL_MOVEMENT_H_
