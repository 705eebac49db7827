// Kernels that run before and after all other kernels of a block call. The first kernel decides
// which launches run.
#ifndef EP_RUNTIME_CUDA_BLOCK_DECIDE_H_
#define EP_RUNTIME_CUDA_BLOCK_DECIDE_H_

#include <cuda_runtime.h>

#include "cuda/block/block_call.h"

namespace ep_runtime {
namespace cuda {
namespace block {

struct DecideParams {
  DeviceGroup* group;
  CallName name;
  BlockSizes sizes;
  int32_t chunks;
  const int32_t* most;         // [1], device: rows of the fullest slab of all ranks
  const int32_t* group_sizes;  // [L], device
  const int32_t* made;         // [1], device, or null: BlockParams::made
  Decision* decision;          // device
};
// Fills `decision`. Also counts the chunks if there are several.
cudaError_t LaunchDecide(cudaStream_t stream, const DecideParams& params);

// Copies a chunk's slots for its own prepare, without slots that the whole plan dropped.
struct SlotsParams {
  const int32_t* wanted;    // [1], device
  const int32_t* topk_idx;  // [slots], device: the chunk's slots
  const int32_t* dst_rank;  // [slots], device: the whole plan's ranks of the chunk's slots
  int32_t slots;
  int32_t* out;  // [slots], device
};
cudaError_t LaunchSlots(cudaStream_t stream, const SlotsParams& params);

// Fills all float results with NaN if an exchange of the call failed, because products of rows that
// never arrived may be finite.
cudaError_t LaunchEnd(cudaStream_t stream, const BlockParams& params, bool backward);

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_DECIDE_H_
