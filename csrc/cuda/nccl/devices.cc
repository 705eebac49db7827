// The CUDA side of communicators: current devices, and the first bytes between all ranks.

#include <cuda_runtime.h>

#include <chrono>
#include <string>
#include <thread>

#include "cuda/driver.h"
#include "ffi/nccl_table.h"

namespace ep_runtime {
namespace {

using nccl::Alive;
using nccl::Comm;
using nccl::Communicator;

// Of each rank to each: small, yet through every connection that rows take later.
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

// Never cudaStreamSynchronize: a peer that died leaves the kernel spinning until we abort.
Status AwaitStream(cudaStream_t stream, int64_t budget_ns, const Alive& alive) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(budget_ns);
  for (;;) {
    const cudaError_t found = cudaStreamQuery(stream);
    if (found == cudaSuccess) return Status();
    if (found != cudaErrorNotReady) return cuda::Check(found, "NCCL's first exchange");
    EP_RETURN_IF_ERROR(alive());
    if (std::chrono::steady_clock::now() > deadline) {
      return Error(Code::kDeadlineExceeded, "OpTimeoutError")
          .Says("NCCL's first exchange was not done within " +
                std::to_string(static_cast<double>(budget_ns) * 1e-9) + " s");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// Where it fails, stream and memory stay: freeing them would wait for a kernel that only the abort
// ends, which comes after us.
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

}  // namespace

nccl::Devices NcclDevices() {
  return {[](int device) { return cuda::Check(cudaSetDevice(device), "cudaSetDevice"); }, TryOut,
          nccl::MakeCudaSideStream};
}

}  // namespace ep_runtime
