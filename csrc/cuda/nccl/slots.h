// Values of one number a slot, and rows that no slot has, around an exchange between nodes.
//
// Letters: V virtual tokens of K slots (`ops/calls/plan.py`), C rows of a slab of L experts.
#ifndef EP_RUNTIME_CUDA_NCCL_SLOTS_H_
#define EP_RUNTIME_CUDA_NCCL_SLOTS_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace nccl {

struct Slots {
  const int32_t* row;  // [V * K], device: of the slab; others than 0 to C - 1: no row here
  int64_t count;       // V * K
  int32_t capacity;    // C
};

// of_row[row of slot i] = of_slot[i], or 1 where that is null.
cudaError_t LaunchToRows(cudaStream_t stream, const Slots& slots, const float* of_slot,
                         float* of_row);
// of_slot[i] = of_row[row of slot i], 0 without a row.
cudaError_t LaunchToSlots(cudaStream_t stream, const Slots& slots, const float* of_row,
                          float* of_slot);
// Of what every rank says of this one's `count` slots, [ranks, count], that of the rank that holds
// the slot's row; 0 where none does.
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
  bool past_rows;              // zeros in rows past the last zone too
  bool past_of_row;
};
cudaError_t LaunchEmptyRows(cudaStream_t stream, const EmptyRowsParams& params);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_SLOTS_H_
