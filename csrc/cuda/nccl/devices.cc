// CUDA's implementation of Devices: current devices, the first bytes between all ranks, and a sum.

#include <cuda_runtime.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/nccl/communicators.h"

namespace ep_runtime {
namespace {

using nccl::Alive;
using nccl::Comm;
using nccl::Communicator;

// Size of a message from every rank to every rank, which opens each connection that rows use later.
constexpr size_t kTryBytes = 256;

const nccl::Api* TheApi() {
  const nccl::Api* api = nullptr;
  return nccl::Load("", &api).ok() ? api : nullptr;
}

int ExchangeAll(const nccl::Api& api, const Communicator& communicator, uint8_t* memory, Comm* comm,
                cudaStream_t stream) {
  const int ranks = communicator.place().ranks;
  uint8_t* received = memory + ranks * kTryBytes;
  int result = nccl::kSuccess;
  for (int peer = 0; peer < ranks; ++peer) {
    for (const int got :
         {api.send(memory + peer * kTryBytes, kTryBytes, nccl::kInt8, peer, comm, stream),
          api.receive(received + peer * kTryBytes, kTryBytes, nccl::kInt8, peer, comm, stream)}) {
      if (got != nccl::kSuccess && got != nccl::kInProgress) result = got;
    }
  }
  return result;
}

// Polls instead of calling cudaStreamSynchronize: after a peer's death the kernel spins until this
// process aborts.
Status AwaitStream(cudaStream_t stream, int64_t budget_ns, const Alive& alive) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(budget_ns);
  for (;;) {
    const cudaError_t found = cudaStreamQuery(stream);
    if (found == cudaSuccess) return Status();
    if (found != cudaErrorNotReady) return cuda::Check(found, "what is tried over NCCL");
    EP_RETURN_IF_ERROR(alive());
    if (std::chrono::steady_clock::now() > deadline) {
      return Error(Code::kDeadlineExceeded, "OpTimeoutError")
          .Says("What was tried over NCCL was not done within " +
                std::to_string(static_cast<double>(budget_ns) * 1e-9) + " s");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// After a failure, stream and memory are not freed: freeing would wait for a kernel that ends only
// when the communicator is aborted later.
Status TryOut(Communicator& communicator, int64_t budget_ns, const Alive& alive) {
  const nccl::Api* api = TheApi();
  if (api == nullptr) return Internal("NCCL is not loaded");
  cudaStream_t stream = nullptr;
  uint8_t* memory = nullptr;
  EP_RETURN_IF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  EP_RETURN_IF_CUDA(cudaMalloc(&memory, 2 * communicator.place().ranks * kTryBytes));
  const auto issue = [&](Comm* comm) {
    return ExchangeAll(*api, communicator, memory, comm, stream);
  };
  EP_RETURN_IF_ERROR(communicator.Run(issue, budget_ns, alive));
  EP_RETURN_IF_ERROR(AwaitStream(stream, budget_ns, alive));
  EP_RETURN_IF_CUDA(cudaFree(memory));
  return cuda::Check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Number of values to sum, enough for several of NCCL's steps on every channel.
constexpr size_t kSummed = size_t{1} << 20;

// Rank r contributes (r + 1) times this value, so sums are exact in int32, and neighbouring sums
// differ.
int32_t Summand(size_t i) { return static_cast<int32_t>(i % 65521) + 1; }

Status CheckSums(const std::vector<int32_t>& found, int ranks) {
  const int32_t factor = ranks * (ranks + 1) / 2;
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == factor * Summand(i)) continue;
    return Internal("an all-reduce of " + std::to_string(ranks) + " ranks gave " +
                    std::to_string(found[i]) + " at " + std::to_string(i) + ", wanted " +
                    std::to_string(factor * Summand(i)));
  }
  return Status();
}

// Like TryOut, does not free its memory after a failure.
Status TrySum(Communicator& communicator, int64_t budget_ns, const Alive& alive) {
  const nccl::Api* api = TheApi();
  if (api == nullptr) return Internal("NCCL is not loaded");
  const nccl::Place& place = communicator.place();
  std::vector<int32_t> values(kSummed);
  for (size_t i = 0; i < kSummed; ++i) values[i] = (place.rank + 1) * Summand(i);
  const size_t bytes = kSummed * sizeof(int32_t);
  cudaStream_t stream = nullptr;
  int32_t* memory = nullptr;
  EP_RETURN_IF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  EP_RETURN_IF_CUDA(cudaMalloc(&memory, bytes));
  EP_RETURN_IF_CUDA(cudaMemcpyAsync(memory, values.data(), bytes, cudaMemcpyHostToDevice, stream));
  EP_RETURN_IF_ERROR(AwaitStream(stream, budget_ns, alive));
  const auto issue = [&](Comm* comm) {
    return api->all_reduce(memory, memory, kSummed, nccl::kInt32, nccl::kSum, comm, stream);
  };
  EP_RETURN_IF_ERROR(communicator.Run(issue, budget_ns, alive));
  EP_RETURN_IF_ERROR(AwaitStream(stream, budget_ns, alive));
  EP_RETURN_IF_CUDA(cudaMemcpyAsync(values.data(), memory, bytes, cudaMemcpyDeviceToHost, stream));
  EP_RETURN_IF_ERROR(AwaitStream(stream, budget_ns, alive));
  EP_RETURN_IF_CUDA(cudaFree(memory));
  EP_RETURN_IF_CUDA(cudaStreamDestroy(stream));
  return CheckSums(values, place.ranks);
}

}  // namespace

nccl::Devices NcclDevices() {
  return {[](int device) { return cuda::Check(cudaSetDevice(device), "cudaSetDevice"); }, TryOut,
          nccl::MakeCudaAbortMark, TrySum};
}

}  // namespace ep_runtime
