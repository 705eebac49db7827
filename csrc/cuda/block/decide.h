// What a block call decides on the device, before anything else, and what it does after all else.
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
  int32_t parts;
  const int32_t* most;         // [1], device: rows of the fullest slab of all ranks
  const int32_t* group_sizes;  // [L], device
  const int32_t* made;         // [1], device, or null: as BlockParams
  Decision* decision;          // device
};
// Also counts the parts where there are more than one.
cudaError_t LaunchDecide(cudaStream_t stream, const DecideParams& params);

// Slots of a part of the tokens for its own prepare: those that the whole plan dropped stay out.
struct SlotsParams {
  const int32_t* wanted;    // [1], device
  const int32_t* topk_idx;  // [slots], device, of the part
  const int32_t* dst_rank;  // [slots], device, of the part in the whole plan
  int32_t slots;
  int32_t* out;  // [slots], device
};
cudaError_t LaunchSlots(cudaStream_t stream, const SlotsParams& params);

// Fills all float results with NaN where an exchange of the call failed: products of rows that did
// not come are finite.
cudaError_t LaunchEnd(cudaStream_t stream, const BlockParams& params, bool backward);

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_DECIDE_H_
