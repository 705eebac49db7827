// Enough of CUDA to run a warp's code on a host.
// Enough of CUDA to run a warp's code on a host: 32 lanes take turns, and meet where they exchange
// values. gemm_indices.cc is compiled so that it finds this header before the real one.
#ifndef EP_RUNTIME_TESTS_CSRC_WARP_CUDA_RUNTIME_H_
#define EP_RUNTIME_TESTS_CSRC_WARP_CUDA_RUNTIME_H_

#include <algorithm>
#include <cstdint>

#define __host__
#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

struct ThreadIndex {
  unsigned x;
};
extern ThreadIndex threadIdx;

// Gives `value`, waits for all lanes, and returns the value that `lane` gave.
uint64_t FromLane(uint64_t value, int lane);

inline int32_t __ldg(const int32_t* from) { return *from; }

template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
  return static_cast<T>(FromLane(static_cast<uint64_t>(value), lane));
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int step) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return static_cast<T>(FromLane(static_cast<uint64_t>(value), lane < step ? lane : lane - step));
}
inline int32_t __reduce_add_sync(uint32_t, int32_t value) {
  int32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += __shfl_sync(0, value, lane);
  return sum;
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) {
    bits |= static_cast<uint32_t>(__shfl_sync(0, static_cast<int>(value), lane)) << lane;
  }
  return bits;
}
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }

#endif  // EP_RUNTIME_TESTS_CSRC_WARP_CUDA_RUNTIME_H_
