// Makes and caches tensor maps.
#include "cuda/gemm/tensor_map.h"

#include <tuple>

#include "core/base/recent_map.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

using EncodeFn = decltype(&cuTensorMapEncodeTiled);

// Returns the driver's function, or null if the driver lacks it. The lookup is by name, because
// this library does not link the driver.
EncodeFn FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeFn>(found);
}

CUtensorMapDataType DataType(FloatType type) {
  switch (type) {
    case FloatType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case FloatType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case FloatType::kE4M3:
    case FloatType::kE5M2:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case FloatType::kTF32:
      return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    case FloatType::kF32:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

cudaError_t Encode(const Array& array, int box_lines, CUtensorMap* map) {
  static const EncodeFn encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t element = BytesOf(array.type);
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(array.width),
                              static_cast<cuuint64_t>(array.lines),
                              static_cast<cuuint64_t>(array.planes)};
  const cuuint64_t strides[2] = {dims[0] * element, dims[0] * dims[1] * element};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / element),
                             static_cast<cuuint32_t>(box_lines), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, DataType(array.type), 3, const_cast<void*>(array.data), dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t DescribeArray(const Array& array, int box_lines, CUtensorMap* map) {
  using Key = std::tuple<const void*, FloatType, int64_t, int64_t, int64_t, int>;
  constexpr size_t kMost = 512;
  // All chunks of a block call use the same arrays, and a step mostly uses the arrays of the
  // previous step.
  thread_local RecentMap<Key, CUtensorMap, kMost> known;
  const Key key{array.data, array.type, array.width, array.lines, array.planes, box_lines};
  if (const CUtensorMap* found = known.Find(key)) {
    *map = *found;
    return cudaSuccess;
  }
  const cudaError_t error = Encode(array, box_lines, map);
  if (error == cudaSuccess) known.Add(key, *map);
  return error;
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
