// Moves rows of a permutation: copies tokens to rows, and sums rows into tokens. The plan of
// `ops/permutation/plan.py` gives the places.
#ifndef EP_RUNTIME_CUDA_ROWS_MOVE_ROWS_H_
#define EP_RUNTIME_CUDA_ROWS_MOVE_ROWS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {

struct GatherRowsParams {
  RowType type;           // kBytes: rows are only copied
  int32_t rows;           // number of rows of `out`
  int32_t tokens;         // number of rows of `values`
  int32_t slots;          // number of slots of a token
  int64_t row_bytes;      // a multiple of 16
  const int32_t* source;  // [rows], device: token * slots + slot; negative: no token, a row of
                          // zeros
  const void* values;     // [tokens, row_bytes], device
  const float* weights;   // [tokens * slots], device, factors of slots' rows; null: none
  const void* others;     // [rows, row_bytes], device; null: none
  void* out;              // [rows, row_bytes], device
  float* products;  // [rows], device: dot product of each row of `others` and its token; 0 without
                    // a token
};
// Makes one launch. `weights`, `others` and `products` need a float type.
cudaError_t LaunchGatherRows(cudaStream_t stream, const GatherRowsParams& params);

// Gathers the same rows, but reads a token once and stores its row for every slot. `source` and
// `slot_row` must be inverse to each other.
struct SpreadRowsParams {
  RowType type;       // kBytes: rows are only copied
  int32_t rows;       // number of rows of `out`
  int32_t tokens;     // number of rows of `values`
  int32_t slots;      // number of slots of a token
  int64_t row_bytes;  // a multiple of 16
  // [rows], device; negative: no slot has the row, which becomes zero. Null: rows without a slot do
  // not change
  const int32_t* source;
  const int32_t* slot_row;   // [tokens, slots], device: negative: the slot has no row
  const void* values;        // [tokens, row_bytes], device
  const float* weights;      // [tokens, slots], device, factors of slots' rows; null: none
  const void* others;        // [rows, row_bytes], device; null: none
  void* out;                 // [rows, row_bytes], device
  float* products;           // [rows], device: like GatherRowsParams
  bool row_weights = false;  // true: `weights` is [rows]
};
// Makes one launch. `weights`, `others` and `products` need a float type.
cudaError_t LaunchSpreadRows(cudaStream_t stream, const SpreadRowsParams& params);

struct SumRowsParams {
  RowType type;              // kF32, kBF16 or kF16; summed in f32, rounded once
  int32_t tokens;            // number of rows of `out`
  int32_t slots;             // S
  int32_t num_rows;          // number of rows of `rows`
  int64_t row_bytes;         // a multiple of 16
  const int32_t* slot_row;   // [tokens, S], device: negative: the slot has no row
  const void* rows;          // [num_rows, row_bytes], device
  const float* weights;      // [tokens, S], device, factors of slots' rows; null: none
  void* out;                 // [tokens, row_bytes], device: sums in slot order
  bool row_weights = false;  // true: `weights` is [num_rows]
};
// Makes one launch.
cudaError_t LaunchSumRows(cudaStream_t stream, const SumRowsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_MOVE_ROWS_H_
