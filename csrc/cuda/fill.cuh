// Fills results of a failed call, so that partial results do not look valid.
#ifndef EP_RUNTIME_CUDA_FILL_CUH_
#define EP_RUNTIME_CUDA_FILL_CUH_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

struct Output {
  void* data;  // device, aligned to 4 bytes unless all bytes of the pattern are equal
  int64_t bytes;
  uint32_t pattern;  // word that a failed call fills `data` with
};

// Writes the part of `output` that belongs to thread `thread` of `threads`, 16 bytes at a time.
__device__ inline void FillOutput(const Output& output, int64_t thread, int64_t threads) {
  const uint32_t pattern = output.pattern;
  auto* bytes = static_cast<uint8_t*>(output.data);
  const bool aligned = reinterpret_cast<uintptr_t>(bytes) % 16 == 0;
  const int64_t vectors = aligned ? output.bytes / 16 : 0;
  const uint4 four = make_uint4(pattern, pattern, pattern, pattern);
  for (int64_t i = thread; i < vectors; i += threads) reinterpret_cast<uint4*>(bytes)[i] = four;
  for (int64_t i = vectors * 16 + thread; i < output.bytes; i += threads) {
    bytes[i] = static_cast<uint8_t>(pattern >> i % 4 * 8);
  }
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_FILL_CUH_
