// Slabs of rows, device memory that shows writes past its end, and the checks and times of
// rows_main.
#ifndef EP_RUNTIME_TESTS_GPU_ROWS_CASE_H_
#define EP_RUNTIME_TESTS_GPU_ROWS_CASE_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "rows_reference.h"

namespace rows_test {

#define CHECK_CUDA(expr)                                                 \
  do {                                                                   \
    const cudaError_t error_ = (expr);                                   \
    if (error_ != cudaSuccess) {                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, \
                   cudaGetErrorString(error_));                          \
      std::exit(3);                                                      \
    }                                                                    \
  } while (0)

// Filled with 0xFF, which is NaN in every float type. Bytes behind its end must not change.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    CHECK_CUDA(cudaMalloc(&data_, bytes + kGuard));
    Poison();
  }
  template <typename T>
  explicit Memory(const std::vector<T>& host)
      : Memory(static_cast<int64_t>(host.size() * sizeof(T))) {
    CHECK_CUDA(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  explicit Memory(const Floats& host) : Memory(host.bytes()) {}
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  void Poison() const { CHECK_CUDA(cudaMemset(data_, 0xFF, bytes_ + kGuard)); }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> host(bytes_ + kGuard);
    CHECK_CUDA(cudaMemcpy(host.data(), data_, bytes_ + kGuard, cudaMemcpyDeviceToHost));
    for (int64_t i = bytes_; i < bytes_ + kGuard; ++i) {
      if (host[i] != 0xFF) {
        std::printf("byte %lld past the end was written\n", static_cast<long long>(i - bytes_));
        host.assign(1, 0);  // fails every comparison
        return host;
      }
    }
    host.resize(bytes_);
    return host;
  }

 private:
  static constexpr int64_t kGuard = 4096;
  int64_t bytes_;
  void* data_ = nullptr;
};

struct Slabs {
  int slabs = 1;
  int rows = 1;            // C
  int groups = 1;          // L
  std::vector<int> sizes;  // [slabs * groups]
  std::vector<int> owner;  // [slabs * rows] group among all; -1: slack
  int64_t used = 0;

  Slabs(int slabs, int rows, std::vector<int> sizes);
  int64_t all_rows() const { return int64_t{slabs} * rows; }
  ec::rows::RowGroups On(const Memory& sizes) const {
    return {sizes.as<const int32_t>(), slabs, groups, rows};
  }
};
Slabs RandomSlabs(std::mt19937& random, int multiple = 1);

// Runs twice on poisoned results. Returns whether both launches succeeded with the same bytes.
bool RunTwice(const std::function<cudaError_t()>& launch, const std::vector<const Memory*>& results,
              const std::string& name);

struct Tally {
  int cases = 0;
  int wrong = 0;
  void Add(bool right, const std::string& name);
};

// Checks all cases of a kind, with `count` random ones.
void CheckActivations(std::mt19937& random, int count, Tally* tally);
void CheckQuantized(std::mt19937& random, int count, Tally* tally);
void CheckFused(std::mt19937& random, int count, Tally* tally);
void CheckMoves(std::mt19937& random, int count, Tally* tally);

void TimeAll();

}  // namespace rows_test

#endif  // EP_RUNTIME_TESTS_GPU_ROWS_CASE_H_
