// Launches prepare on GPUs.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_
#define EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

// With slots for copies of experts, a plan is of physical experts: a rank's L own ones, followed by
// its S slots. moe/copies.py explains which rows go to which.
struct SpreadParams {
  int32_t spare = 0;           // S; 0: no copies
  int32_t most_kept = 0;       // rows that a rank's experts may keep before they are spread
  int32_t* experts = nullptr;  // [N, S] device: the expert of each slot, -1: none
};

struct PrepareParams {
  DeviceGroup* group;  // device, never freed
  CallName name;
  CallSizes sizes;
  int32_t num_experts;      // E of the EP group, at most kMaxExperts
  int32_t alignment;        // rows; zones are rounded up to multiples of this for comparison with C
  int32_t row_alignment;    // rows; zones in the slab are rounded up to multiples of this; divides
                            // `alignment`
  const int32_t* topk_idx;  // [T, K] int32, device, written by XLA; a slot is unused if its number
                            // is not an expert of the EP group
  MutablePlan plan;         // all written; with slots its experts are physical ones
  DeviceVerdict* verdict;   // [1] device or host-mapped; null: on_overflow="drop", no exchange
  int32_t blocks = 32;      // upper bound, without the block that reports; all must be resident
  LaneRoom room{};          // decides whether recv_count has the counts of all pairs of ranks
  int32_t* most = nullptr;  // [1] device: rows in the zones of the fullest slab; or null
  SpreadParams spread{};
};

// Routes this rank's slots. Counts travel to all peers, then one entry per kept row to the rank
// that gets the row. All ranks compute the same result from the same count matrix.
cudaError_t LaunchPrepare(cudaStream_t stream, PrepareParams params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_PREPARE_PREPARE_KERNELS_H_
