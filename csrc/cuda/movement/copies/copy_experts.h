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
  int32_t sms;             // each holds a block that sends and one that receives, all at once
  int32_t local;           // L, experts of a rank
  int32_t spare;           // S, slots of a rank, at most kMaxSpare
  const int32_t* experts;  // [N, S], device: the expert of each slot, -1: none
  int64_t block_bytes;     // bytes of one expert, a multiple of 16
  bool home;               // false: weights go to slots; true: gradients go to owners
  RowType type;            // of gradients, which are added; weights are only bytes
  // If `home` is false, weights of this rank's experts [L] go to slots [S]; slots without an expert
  // do not change. If true, gradients in slots [S] are added, in f32 and in rank order, to those of
  // their experts [L]. Each round of the kernel rounds its sums once.
  const void* from;
  void* to;
  uint32_t lost;  // word that a failed call fills `to` with
};

// Whether lanes have room for a chunk of each source.
bool CopiesFit(const LaneRoom& room, int64_t max_tokens);

// Copies whole experts between ranks, through the same lanes as rows.
cudaError_t LaunchCopyExperts(cudaStream_t stream, CopyExpertsParams params, int64_t max_tokens);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COPIES_COPY_EXPERTS_H_
