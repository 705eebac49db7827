// Moves values of slots, and fills rows without a slot, before and after an exchange between nodes.
//
// Letters: V virtual tokens of K slots (`ops/calls/plan.py`), C rows of a slab of L experts.
#ifndef EP_RUNTIME_CUDA_NCCL_SLOTS_H_
#define EP_RUNTIME_CUDA_NCCL_SLOTS_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace nccl {

struct Slots {
  const int32_t* row;  // [V * K], device: row in the slab; not from 0 to C - 1: no row on this rank
  int64_t count;       // V * K
  int32_t capacity;    // C
};

// of_row[row of slot i] = of_slot[i], or 1 if of_slot is null.
cudaError_t LaunchToRows(cudaStream_t stream, const Slots& slots, const float* of_slot,
                         float* of_row);
// of_slot[i] = of_row[row of slot i], or 0 without a row.
cudaError_t LaunchToSlots(cudaStream_t stream, const Slots& slots, const float* of_row,
                          float* of_slot);
// Picks for each of this rank's `count` slots the value that the rank with the slot's row sent,
// from [ranks, count]; 0 if no rank has the row.
cudaError_t LaunchPickSlots(cudaStream_t stream, const int32_t* dst_rank, int64_t count,
                            int32_t ranks, const float* of_ranks, float* of_slot);

struct EmptyRowsParams {
  const int32_t* kept;         // [L], device
  const int32_t* group_sizes;  // [L], device
  int32_t experts;             // L
  int32_t capacity;            // C
  int64_t row_bytes;           // a multiple of 16
  void* rows;                  // [C, row_bytes], device: zeros in padding
  float* of_row;               // [C], device: likewise, or null
  bool past_rows;              // true: rows past the last zone of `rows` become zero too
  bool past_of_row;
};
cudaError_t LaunchEmptyRows(cudaStream_t stream, const EmptyRowsParams& params);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_SLOTS_H_
