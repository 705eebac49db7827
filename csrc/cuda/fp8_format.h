// Fp8Format: the two 8-bit float formats.
#ifndef EP_RUNTIME_CUDA_FP8_FORMAT_H_
#define EP_RUNTIME_CUDA_FP8_FORMAT_H_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

enum class Fp8Format : int32_t { kE4M3 = 0, kE5M2 = 1 };

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_FP8_FORMAT_H_
