// Copies of experts: their weights go to slots of other ranks, and their gradients come home.
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
  const int32_t* experts;  // [N, S], device: the expert of each slot, -1 without one
  int64_t block_bytes;     // of one expert, a multiple of 16
  bool home;               // false: weights go to slots; true: gradients of slots go home
  // To slots: both are [L + S] blocks, one array; blocks of slots without an expert do not change.
  // Home: `from` is [L + S] blocks, and `to` [N, S]: what each slot of each rank has for an expert
  // of this rank. Other blocks do not change.
  const void* from;
  void* to;
  uint32_t lost;  // word that a failed call fills `to` with
};

// The launches of such a call. Those that have nothing to do return at once, on all ranks.
// 0: lanes are too small for it.
int64_t CopyExpertsLaunches(const LaneRoom& room, int64_t max_tokens, int64_t spare,
                            int64_t block_bytes);

// Sends whole experts between ranks, through the lanes that rows go through.
cudaError_t LaunchCopyExperts(cudaStream_t stream, const CopyExpertsParams& params,
                              int64_t max_tokens);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COPIES_COPY_EXPERTS_H_
