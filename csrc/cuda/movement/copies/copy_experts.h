// Copies experts: sends weights to slots of other ranks, and returns gradients to the experts'
// owners.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COPIES_COPY_EXPERTS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_COPIES_COPY_EXPERTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

constexpr int kMaxSpare = 256;  // slots of a rank

struct CopyExpertsParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  LaneRoom room;
  int32_t push_blocks;  // blocks that send; all blocks must be resident at once
  int32_t place_blocks;
  int32_t local;           // L, experts of a rank
  int32_t spare;           // S, slots of a rank, at most kMaxSpare
  const int32_t* experts;  // [N, S], device: the expert of each slot, -1: none
  int64_t block_bytes;     // bytes of one expert, a multiple of 16
  bool home;               // false: weights go to slots; true: gradients go to owners
  // If `home` is false, both are one array of [L + S] blocks; blocks of slots without an expert do
  // not change. If true, `from` is [L + S] blocks, and `to` is [N, S] blocks, which get the
  // gradients of this rank's experts from each slot of each rank. Other blocks do not change.
  const void* from;
  void* to;
  uint32_t lost;  // word that a failed call fills `to` with
};

// Returns the number of launches of such a call, or 0 if lanes are too small. Launches that have
// nothing to do return at once, on all ranks.
int64_t CopyExpertsLaunches(const LaneRoom& room, int64_t max_tokens, int64_t spare,
                            int64_t block_bytes);

// Sends whole experts between ranks, through the same lanes as rows.
cudaError_t LaunchCopyExperts(cudaStream_t stream, const CopyExpertsParams& params,
                              int64_t max_tokens);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COPIES_COPY_EXPERTS_H_
