#include "cuda/gemm/kernels/grouped_gemm_kernel.cuh"
#include "cuda/gemm/kernels/instances.h"
#include "cuda/shared_bytes.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

template <class Traits>
cudaError_t Launch(cudaStream_t stream, const Maps& maps, const KernelArguments& args, int blocks) {
  constexpr int kBytes = sizeof(SharedMemory<Traits>);
  static_assert(kBytes <= 227 << 10, "a block has 227 KiB");
  const cudaError_t error = AllowSharedBytes(GroupedGemmKernel<Traits>, kBytes);
  if (error != cudaSuccess) return error;
  GroupedGemmKernel<Traits>
      <<<blocks, kThreads, kBytes, stream>>>(maps.lhs, maps.rhs, maps.out, maps.up, args);
  return cudaGetLastError();
}

template <GemmProduct product, FloatType type, FloatType out>
constexpr Instance Make() {
  using Traits = KernelTraits<product, Element<type>, Element<out>>;
  return {product, type, type, out, false, Summing::kWhole, &Launch<Traits>};
}

#define EP_MAKE_DIRECT(product, type, out) \
  Make<GemmProduct::product, FloatType::type, FloatType::out>(),
constexpr Instance kInstances[] = {EP_GEMM_DIRECT(EP_MAKE_DIRECT)};

}  // namespace

Instances DirectInstances() { return {kInstances, sizeof(kInstances) / sizeof(kInstances[0])}; }

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime
