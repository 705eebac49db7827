// Device memory that shows missing writes and writes past its end.
#ifndef EP_RUNTIME_TESTS_GPU_MEMORY_H_
#define EP_RUNTIME_TESTS_GPU_MEMORY_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace gpu_test {

#define CHECK_CUDA(expr)                                                                    \
  do {                                                                                      \
    const cudaError_t error_ = (expr);                                                      \
    if (error_ != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #expr, cudaGetErrorString(error_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)

// Filled with 0xFF.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    CHECK_CUDA(cudaMalloc(&data_, bytes + kTail));
    Poison();
  }
  template <typename T>
  explicit Memory(const std::vector<T>& host) : Memory(host.size() * sizeof(T)) {
    CHECK_CUDA(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void Poison() { CHECK_CUDA(cudaMemset(data_, 0xFF, bytes_ + kTail)); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  // Whether nothing was written past the end.
  bool intact() const {
    std::vector<uint8_t> tail(kTail);
    const auto* end = static_cast<uint8_t*>(data_) + bytes_;
    CHECK_CUDA(cudaMemcpy(tail.data(), end, kTail, cudaMemcpyDeviceToHost));
    return std::all_of(tail.begin(), tail.end(), [](uint8_t byte) { return byte == 0xFF; });
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> host(bytes_ / sizeof(T));
    CHECK_CUDA(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  static constexpr size_t kTail = 256;

  size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_MEMORY_H_
