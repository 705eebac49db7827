// Slabs and groups of rows, as arguments of kernels that visit rows.
#ifndef EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_H_
#define EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/device_group.h"

namespace ep_runtime {
namespace cuda {
namespace rows {

constexpr int kMaxSlabs = 65535;         // CUDA's limit of gridDim.y
constexpr int kMaxGroupsPerSlab = 1024;  // a block keeps the groups' ends in shared memory
constexpr int64_t kMaxRows = 1ll << 31;  // rows in all slabs, exclusive
constexpr int kVectorBytes = 16;         // bytes of one load; a row has a multiple of so many

struct RowGroups {
  const int32_t* sizes;     // [num_slabs, groups_per_slab], device; null: one group of all rows
  int32_t num_slabs;        // S, at most kMaxSlabs
  int32_t groups_per_slab;  // L, at most kMaxGroupsPerSlab; 1 without sizes
  int32_t slab_rows;        // C; rows of groups past it are cut off
};

inline bool Fits(const RowGroups& groups) {
  return groups.num_slabs > 0 && groups.num_slabs <= kMaxSlabs && groups.groups_per_slab >= 0 &&
         groups.groups_per_slab <= kMaxGroupsPerSlab && groups.slab_rows > 0 &&
         static_cast<int64_t>(groups.num_slabs) * groups.slab_rows < kMaxRows &&
         (groups.sizes != nullptr || groups.groups_per_slab == 1);
}

inline bool Aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// Returns the threads of a block that share `vectors`: whole warps, at most `most` threads, and no
// warp without work.
inline int ThreadsFor(int64_t vectors, int most) {
  const int64_t threads = (vectors + 31) / 32 * 32;
  return static_cast<int>(threads < most ? threads : most);
}

// Calls `launch(type)` with a float type as a std::integral_constant, which kernels take as an
// argument.
template <typename Launch>
cudaError_t LaunchForFloat(RowType type, const Launch& launch) {
  switch (type) {
    case RowType::kF32:
      launch(std::integral_constant<RowType, RowType::kF32>{});
      break;
    case RowType::kBF16:
      launch(std::integral_constant<RowType, RowType::kBF16>{});
      break;
    case RowType::kF16:
      launch(std::integral_constant<RowType, RowType::kF16>{});
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

inline cudaError_t Processors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess
             ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device)
             : error;
}

// Sets the grid for the rows of every slab: at most `per_processor` blocks per multiprocessor in
// total, and no more than there is work for.
inline cudaError_t GridOf(const RowGroups& groups, int rows_per_block, int per_processor,
                          dim3* grid) {
  int processors = 0;
  const cudaError_t error = Processors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t useful =
      (static_cast<int64_t>(groups.slab_rows) + rows_per_block - 1) / rows_per_block;
  const int64_t most =
      (static_cast<int64_t>(processors) * per_processor + groups.num_slabs - 1) / groups.num_slabs;
  *grid = dim3(static_cast<unsigned>(useful < most ? useful : most), groups.num_slabs);
  return cudaSuccess;
}

}  // namespace rows
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_ROW_GROUPS_H_
