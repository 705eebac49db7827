#include "cuda/gemm/clear_slack.h"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/grouped_gemm_kernel.cuh"
#include "cuda/gemm/tensor_map.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

struct Maps {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap out;
};

using LaunchFn = cudaError_t (*)(cudaStream_t, const Maps&, const KernelArguments&, int blocks);

template <class Traits>
cudaError_t Launch(cudaStream_t stream, const Maps& maps, const KernelArguments& args, int blocks) {
  constexpr int kBytes = sizeof(SharedMemory<Traits>);
  static_assert(kBytes <= 227 << 10, "a block has 227 KiB");
  const cudaError_t error = cudaFuncSetAttribute(
      GroupedGemmKernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  GroupedGemmKernel<Traits>
      <<<blocks, kThreads, kBytes, stream>>>(maps.lhs, maps.rhs, maps.out, args);
  return cudaGetLastError();
}

struct Instance {
  GemmProduct product;
  FloatType type;
  FloatType out_type;
  int32_t tile_columns;
  LaunchFn launch;
};

template <GemmProduct product, FloatType type, FloatType out_type, typename In, typename Out,
          int columns>
constexpr Instance Make() {
  return {product, type, out_type, columns, &Launch<KernelTraits<product, In, Out, columns>>};
}

// Every kernel there is.
#define EP_GEMM(product, type, In, out_type, Out, columns) \
  Make<GemmProduct::product, FloatType::type, FloatType::out_type, In, Out, columns>()
constexpr Instance kInstances[] = {
    EP_GEMM(kForward, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 256),
    EP_GEMM(kForward, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 128),
    EP_GEMM(kForward, kBF16, __nv_bfloat16, kF32, float, 256),
    EP_GEMM(kForward, kF16, __half, kF16, __half, 256),
    EP_GEMM(kForward, kF16, __half, kF32, float, 256),
    EP_GEMM(kDataGrad, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 256),
    EP_GEMM(kDataGrad, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 128),
    EP_GEMM(kDataGrad, kBF16, __nv_bfloat16, kF32, float, 256),
    EP_GEMM(kDataGrad, kF16, __half, kF16, __half, 256),
    EP_GEMM(kDataGrad, kF16, __half, kF32, float, 256),
    EP_GEMM(kWeightGrad, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 256),
    EP_GEMM(kWeightGrad, kBF16, __nv_bfloat16, kBF16, __nv_bfloat16, 128),
    EP_GEMM(kWeightGrad, kBF16, __nv_bfloat16, kF32, float, 256),
    EP_GEMM(kWeightGrad, kF16, __half, kF16, __half, 256),
    EP_GEMM(kWeightGrad, kF16, __half, kF32, float, 256),
};
#undef EP_GEMM

LaunchFn FindLaunch(const GroupedGemmParams& params) {
  for (const Instance& instance : kInstances) {
    if (instance.product == params.product && instance.type == params.type &&
        instance.out_type == params.out_type &&
        instance.tile_columns == params.tuning.tile_columns) {
      return instance.launch;
    }
  }
  return nullptr;
}

bool Fits(const GroupedGemmParams& p) {
  const int64_t rows = static_cast<int64_t>(p.num_slabs) * p.slab_rows;
  return p.num_slabs >= 0 && p.slab_rows >= 0 && rows < INT32_MAX && p.groups_per_slab >= 0 &&
         p.num_experts >= 1 && p.num_experts <= kMaxExperts && p.in_features % 8 == 0 &&
         p.out_features % 8 == 0 && p.tuning.band >= 1 &&
         (p.bias == nullptr || p.product == GemmProduct::kForward);
}

cudaError_t MakeMaps(const GroupedGemmParams& p, Maps* maps) {
  const int64_t rows = static_cast<int64_t>(p.num_slabs) * p.slab_rows;
  const bool by_expert = p.product == GemmProduct::kWeightGrad;
  const bool backward = p.product == GemmProduct::kDataGrad;
  const int64_t lhs_width = backward ? p.out_features : p.in_features;
  const int64_t out_width = backward ? p.in_features : p.out_features;
  const Array lhs{p.lhs, p.type, lhs_width, rows, 1};
  const Array weights{p.rhs, p.type, p.out_features, p.in_features, p.num_experts};
  const Array grads{p.rhs, p.type, p.out_features, rows, 1};
  const Array out_rows{p.out, p.out_type, out_width, rows, 1};
  const Array out_weights{p.out, p.out_type, p.out_features, p.in_features, p.num_experts};
  cudaError_t error = DescribeArray(lhs, kPieceSide, &maps->lhs);
  if (error == cudaSuccess) {
    error = DescribeArray(by_expert ? grads : weights, kPieceSide, &maps->rhs);
  }
  if (error == cudaSuccess) {
    error = DescribeArray(by_expert ? out_weights : out_rows, kStoredRows, &maps->out);
  }
  return error;
}

Groups GroupsOf(const GroupedGemmParams& p) {
  return {p.group_sizes, p.num_slabs * p.groups_per_slab, p.groups_per_slab, p.num_experts,
          p.slab_rows};
}

KernelArguments MakeArguments(const GroupedGemmParams& p) {
  KernelArguments args{};
  args.groups = GroupsOf(p);
  const bool backward = p.product == GemmProduct::kDataGrad;
  args.depth = backward ? p.out_features : p.in_features;
  args.band = p.tuning.band;
  args.out.data = p.out;
  // Where groups are rows of the output they say themselves how many.
  args.out.rows = p.in_features;
  args.out.columns = backward ? p.in_features : p.out_features;
  args.out.bias = p.bias;
  args.out.bias_type = p.bias_type;
  return args;
}

// Output without products: there are no rows at all, or nothing to contract.
cudaError_t StoreZeros(cudaStream_t stream, const GroupedGemmParams& p) {
  if (p.product != GemmProduct::kWeightGrad) return cudaErrorInvalidValue;
  const size_t element = p.out_type == FloatType::kF32 ? 4 : 2;
  return cudaMemsetAsync(p.out, 0, element * p.num_experts * p.in_features * p.out_features,
                         stream);
}

cudaError_t ClearSlackOf(cudaStream_t stream, const GroupedGemmParams& p, int processors) {
  const int64_t width = p.product == GemmProduct::kDataGrad ? p.in_features : p.out_features;
  const int64_t element = p.out_type == FloatType::kF32 ? 4 : 2;
  return LaunchClearSlack(stream, GroupsOf(p), p.num_slabs, p.out, width * element, processors);
}

}  // namespace
}  // namespace gemm

GemmTuning TunedGemm(GemmProduct product) {
  // `run_gemm.sh tune` on an H200: 32768 rows in 32 groups, even and Zipf, both layers of an
  // expert.
  switch (product) {
    case GemmProduct::kForward:
      return {256, 1};
    case GemmProduct::kDataGrad:
      return {256, 1};
    case GemmProduct::kWeightGrad:
      return {256, 8};
  }
  return {};
}

cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmParams& params) {
  using gemm::kClusterBlocks;
  const gemm::LaunchFn launch = gemm::FindLaunch(params);
  if (launch == nullptr || !gemm::Fits(params)) return cudaErrorInvalidValue;
  const int64_t rows = static_cast<int64_t>(params.num_slabs) * params.slab_rows;
  const bool by_expert = params.product == GemmProduct::kWeightGrad;
  const int32_t out_columns =
      params.product == GemmProduct::kDataGrad ? params.in_features : params.out_features;
  if (out_columns == 0 || (by_expert ? params.in_features : rows) == 0) return cudaSuccess;
  if (params.in_features == 0 || params.out_features == 0 || rows == 0) {
    return gemm::StoreZeros(stream, params);
  }
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  gemm::Maps maps;
  if (error == cudaSuccess) error = gemm::MakeMaps(params, &maps);
  if (error != cudaSuccess) return error;
  const int blocks = processors / kClusterBlocks * kClusterBlocks;
  error = launch(stream, maps, gemm::MakeArguments(params), blocks);
  if (error != cudaSuccess || !params.clear_slack || by_expert) return error;
  return gemm::ClearSlackOf(stream, params, processors);
}

}  // namespace cuda
}  // namespace ep_runtime
