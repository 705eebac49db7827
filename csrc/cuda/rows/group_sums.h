// Sums the rows of every expert, which gives the gradient of a bias.
#ifndef EP_RUNTIME_CUDA_ROWS_GROUP_SUMS_H_
#define EP_RUNTIME_CUDA_ROWS_GROUP_SUMS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/rows/row_groups.h"

namespace ep_runtime {
namespace cuda {

struct GroupSumsParams {
  RowType type;  // kF32, kBF16 or kF16
  rows::RowGroups groups;
  int32_t width;                    // W; a row has a multiple of 16 bytes
  int32_t num_experts;              // G: group l of slab s is of expert (s * L + l) % G
  const void* values;               // [S * C, W] type, device
  const float* weights = nullptr;   // [S * C], device, factors of the rows; null: none
  float* sums;                      // [G, W], device: summed in a fixed order
  bool adds = false;                // true: adds to the values in `sums`
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};

// Makes one launch. Slack rows are not read; experts without rows get zeros.
cudaError_t LaunchGroupSums(cudaStream_t stream, const GroupSumsParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_GROUP_SUMS_H_
