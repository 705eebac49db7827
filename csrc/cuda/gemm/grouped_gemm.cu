// Checks a product, picks its kernel and launches it.
#include "cuda/gemm/copies/clear_slack.h"
#include "cuda/gemm/copies/transpose.h"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/kernels/instances.h"
#include "cuda/gemm/tensor_map.h"
#include "cuda/gemm/tile/tile_schedule.cuh"
#include "cuda/gemm/tile/wgmma.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {
namespace {

constexpr int kBlockValues = 128;  // values that share a scale, along each dim
constexpr int kHalfMultiple =
    64;  // divides a pair's columns, so that a 128-byte box is within one half

bool IsNarrow(const GroupedGemmParams& params) { return BytesOf(params.type) == 1; }

// The tensor cores take 8-bit and tf32 operands only if the contracted dim is contiguous.
bool IsTransposed(const GroupedGemmParams& params) { return BytesOf(params.type) != 2; }

// Whether each expert has one group, so that one scale serves its whole sum.
bool HasGroupEach(const GroupedGemmParams& p) {
  return p.num_slabs * p.groups_per_slab == p.num_experts;
}

Summing SummingOf(const GroupedGemmParams& params) {
  const bool by_expert = params.product == GemmProduct::kWeightGrad;
  if (params.scaling == GemmScaling::kBlock) {
    return by_expert ? Summing::kByTile : Summing::kByBlock;
  }
  if (!IsNarrow(params)) return Summing::kWhole;
  return by_expert && !HasGroupEach(params) ? Summing::kByGroup : Summing::kPromoted;
}

bool Activates(const GroupedGemmParams& p) { return p.activation.inner != nullptr; }

const Instance* FindInstance(const GroupedGemmParams& params) {
  // If the contracted dim is contiguous, data gradients are computed as forward products.
  const bool rows = IsTransposed(params) && params.product == GemmProduct::kDataGrad;
  const GemmProduct product = rows ? GemmProduct::kForward : params.product;
  for (const Instances all : {Products16Instances(), Rows8Instances(), Weights8Instances(),
                              Rows32Instances(), Weights32Instances(), ActivatedInstances()}) {
    for (const Instance* instance = all.first; instance != all.first + all.count; ++instance) {
      if (instance->product == product && instance->lhs == params.type &&
          instance->rhs == params.rhs_type && instance->out == params.out_type &&
          instance->summing == SummingOf(params) && instance->activates == Activates(params)) {
        return instance;
      }
    }
  }
  return nullptr;
}

bool IsPair(const GroupedGemmParams& p) { return p.rhs_up != nullptr || p.out_up != nullptr; }

// Returns the columns of one array of weights, which may be one of a pair.
int32_t WeightColumns(const GroupedGemmParams& p) {
  return IsPair(p) ? p.out_features / 2 : p.out_features;
}

bool PairFits(const GroupedGemmParams& p) {
  if (!IsPair(p)) return true;
  const bool by_expert = p.product == GemmProduct::kWeightGrad;
  const bool one = by_expert ? p.rhs_up == nullptr : p.out_up == nullptr;
  return one && p.out_features % (2 * kHalfMultiple) == 0 && (by_expert || !IsNarrow(p));
}

// Returns the number of experts in the arrays that hold the first ones.
int32_t HomeExperts(const GroupedGemmParams& p) {
  return p.slots.first == 0 ? p.num_experts : p.slots.first;
}

int64_t WeightBytes(const GroupedGemmParams& p) {
  const bool by_expert = p.product == GemmProduct::kWeightGrad;
  return int64_t{p.in_features} * WeightColumns(p) * BytesOf(by_expert ? p.out_type : p.rhs_type);
}

bool SlotsFit(const GroupedGemmParams& p) {
  if (p.slots.first == 0) return true;
  return p.slots.first < p.num_experts && HasGroupEach(p) && !p.adds &&
         p.slots.weights != nullptr && IsPair(p) == (p.slots.up != nullptr);
}

int64_t RowsOf(const GroupedGemmParams& p) {
  return static_cast<int64_t>(p.num_slabs) * p.slab_rows;
}

// Elements of a line in a transposed copy of the rows.
int64_t PaddedRowsOf(const GroupedGemmParams& p) {
  return p.num_slabs * PaddedSlabRows(p.slab_rows, p.groups_per_slab);
}

bool ScalesFit(const GroupedGemmParams& p) {
  if (!IsNarrow(p)) return p.scaling == GemmScaling::kNone && p.rhs_type == p.type;
  return p.scaling != GemmScaling::kNone && p.lhs_scale != nullptr && p.rhs_scale != nullptr;
}

bool ActivationFits(const GroupedGemmParams& p) {
  if (!Activates(p)) return true;
  const auto function = static_cast<int32_t>(p.activation.function);
  const int32_t multiple = IsNarrow(p) ? kBlockValues : 16 / BytesOf(p.out_type);
  return function >= 0 && function < kActivationFunctions && p.out_features % (2 * multiple) == 0 &&
         (p.activation.scale != nullptr) == IsNarrow(p) && !p.clear_slack;
}

bool TicketsFit(const GroupedGemmParams& p) {
  const GemmTickets& tickets = p.tickets;
  if (tickets.words == nullptr) return true;
  return tickets.blocks >= 0 && tickets.blocks % kClusterBlocks == 0 &&
         tickets.all_blocks % kClusterBlocks == 0 && tickets.blocks <= tickets.all_blocks;
}

bool CopiesWeights(const GroupedGemmParams& p) {
  return p.type == FloatType::kTF32 && p.product == GemmProduct::kForward;
}

// Transposes the weights to rhs_copy, one array even for a pair, and makes that copy the product's
// operand.
cudaError_t CopyWeights(cudaStream_t stream, GroupedGemmParams* p) {
  const int32_t width = p->rhs_up == nullptr ? p->out_features : p->out_features / 2;
  const int32_t home = HomeExperts(*p);
  const auto copy = [&](const void* from, int32_t expert, int32_t experts, int32_t column) {
    if (from == nullptr || experts == 0) return cudaSuccess;
    float* to = static_cast<float*>(p->rhs_copy) +
                (int64_t{expert} * p->out_features + column) * p->in_features;
    return LaunchTranspose(
        stream, TransposedFloatPlanes{static_cast<const float*>(from), to, experts, p->in_features,
                                      width, p->out_features, p->wanted});
  };
  const int32_t more = p->num_experts - home;
  cudaError_t error = copy(p->rhs, 0, home, 0);
  if (error == cudaSuccess) error = copy(p->rhs_up, 0, home, width);
  if (error == cudaSuccess) error = copy(p->slots.weights, home, more, 0);
  if (error == cudaSuccess) error = copy(p->slots.up, home, more, width);
  if (error != cudaSuccess) return error;
  p->rhs = p->rhs_copy;
  p->rhs_up = nullptr;
  p->slots = {};
  return cudaSuccess;
}

bool Fits(const GroupedGemmParams& p) {
  const int32_t multiple = 16 / BytesOf(p.type);  // tensor copies move 16 bytes at a time
  const int64_t rows = IsTransposed(p) ? PaddedRowsOf(p) : RowsOf(p);
  return p.num_slabs >= 0 && p.slab_rows >= 0 && rows < INT32_MAX && p.groups_per_slab >= 0 &&
         p.num_experts >= 1 && p.num_experts <= kMaxExperts && p.in_features % multiple == 0 &&
         p.out_features % multiple == 0 && p.tuning.band >= 1 &&
         (p.bias == nullptr || p.product == GemmProduct::kForward) &&
         (!p.adds || p.product == GemmProduct::kWeightGrad) && ScalesFit(p) && PairFits(p) &&
         ActivationFits(p) && TicketsFit(p) && SlotsFit(p) &&
         CopiesWeights(p) == (p.rhs_copy != nullptr);
}

Array LhsOf(const GroupedGemmParams& p) {
  if (IsTransposed(p) && p.product == GemmProduct::kWeightGrad) {
    return {p.lhs, p.type, PaddedRowsOf(p), p.in_features, 1};
  }
  const bool backward = p.product == GemmProduct::kDataGrad;
  return {p.lhs, p.type, backward ? p.out_features : p.in_features, RowsOf(p), 1};
}

Array RhsOf(const GroupedGemmParams& p) {
  if (p.product == GemmProduct::kWeightGrad) {
    if (IsTransposed(p)) return {p.rhs, p.rhs_type, PaddedRowsOf(p), p.out_features, 1};
    return {p.rhs, p.rhs_type, p.out_features, RowsOf(p), 1};
  }
  if (IsTransposed(p) && p.product == GemmProduct::kForward) {
    return {p.rhs, p.rhs_type, p.in_features, p.out_features, HomeExperts(p)};
  }
  return {p.rhs, p.rhs_type, WeightColumns(p), p.in_features, HomeExperts(p)};
}

Array OutOf(const GroupedGemmParams& p) {
  if (p.product == GemmProduct::kWeightGrad) {
    return {p.out, p.out_type, WeightColumns(p), p.in_features, HomeExperts(p)};
  }
  const bool backward = p.product == GemmProduct::kDataGrad;
  return {p.out, p.out_type, backward ? p.in_features : p.out_features, RowsOf(p), 1};
}

cudaError_t MakeMaps(const GroupedGemmParams& p, Maps* maps) {
  const bool by_expert = p.product == GemmProduct::kWeightGrad;
  const int lines = by_expert ? kStoredRows : kPieceSide;
  Array rhs = RhsOf(p), out = OutOf(p);
  Array& weights = by_expert ? out : rhs;
  Array up = weights, slots = weights, up_slots = weights;
  up.data = by_expert ? p.out_up : p.rhs_up;
  slots.data = p.slots.weights;
  up_slots.data = p.slots.up;
  slots.planes = up_slots.planes = p.num_experts - p.slots.first;
  cudaError_t error = DescribeArray(LhsOf(p), kPieceSide, &maps->lhs);
  if (error == cudaSuccess) error = DescribeArray(rhs, kPieceSide, &maps->rhs);
  if (Activates(p)) {
    const FloatType type = IsNarrow(p) ? FloatType::kE4M3 : p.out_type;
    const Array inner{p.activation.inner, type, p.out_features / 2, RowsOf(p), 1};
    if (error == cudaSuccess) error = DescribeArray(inner, kStoredRows, &maps->inner);
    if (out.data == nullptr) out = inner;  // unused
  }
  if (error == cudaSuccess) error = DescribeArray(out, kStoredRows, &maps->out);
  maps->up = maps->slots = maps->up_slots = maps->rhs;
  if (error == cudaSuccess && IsPair(p)) error = DescribeArray(up, lines, &maps->up);
  if (error != cudaSuccess || p.slots.first == 0) return error;
  error = DescribeArray(slots, lines, &maps->slots);
  if (error != cudaSuccess || !IsPair(p)) return error;
  return DescribeArray(up_slots, lines, &maps->up_slots);
}

Groups GroupsOf(const GroupedGemmParams& p) {
  return {p.group_sizes, p.num_slabs * p.groups_per_slab, p.groups_per_slab, p.num_experts,
          p.slab_rows};
}

Scales ScalesOf(const GroupedGemmParams& p) {
  const auto blocks = [](int32_t values) { return (values + kBlockValues - 1) / kBlockValues; };
  const bool backward = p.product == GemmProduct::kDataGrad;
  const int32_t in = blocks(p.in_features), out = blocks(p.out_features);
  Scales scales{};
  scales.lhs = p.lhs_scale;
  scales.rhs = p.rhs_scale;
  scales.part_step = Activates(p) ? out / 2 : 1;
  if (p.product == GemmProduct::kWeightGrad) {
    scales.lhs_width = in;
    scales.rhs_depth = out;
    return scales;
  }
  scales.last_row = static_cast<int32_t>(RowsOf(p)) - 1;
  scales.lhs_width = backward ? out : in;
  scales.rhs_plane = in * out;
  // [K' / 128, N' / 128]; the product decides which dim is contracted.
  scales.rhs_column = backward ? out : 1;
  scales.rhs_depth = backward ? 1 : out;
  scales.last_column = (backward ? in : out) - 1;
  return scales;
}

KernelArguments MakeArguments(const GroupedGemmParams& p, int32_t blocks) {
  KernelArguments args{};
  args.groups = GroupsOf(p);
  const bool backward = p.product == GemmProduct::kDataGrad;
  args.depth = backward ? p.out_features : p.in_features;
  args.band = p.tuning.band;
  args.half = IsPair(p) ? WeightColumns(p) : INT32_MAX;
  args.first_slot = p.slots.first == 0 ? INT32_MAX : p.slots.first;
  args.out.data = p.out;
  // Unused if output rows are the groups' rows.
  args.out.rows = p.in_features;
  args.out.columns = backward ? p.in_features : p.out_features;
  args.out.bias = p.bias;
  args.out.bias_type = p.bias_type;
  args.out.adds = p.adds;
  const GemmActivation& activation = p.activation;
  args.activation = {activation.function, p.out_features / 2, activation.weights,
                     activation.inner,    activation.scale,   activation.power_of_two};
  args.wanted = p.wanted;
  const int32_t all_blocks = p.tickets.blocks == 0 ? blocks : p.tickets.all_blocks;
  args.tickets = {p.tickets.words, static_cast<uint32_t>(all_blocks / kClusterBlocks)};
  args.scales = ScalesOf(p);
  return args;
}

// Fills the output with zeros instead of running a kernel, if no expert has rows or the
// contracted dim is empty.
cudaError_t StoreZeros(cudaStream_t stream, const GroupedGemmParams& p) {
  if (p.product != GemmProduct::kWeightGrad) return cudaErrorInvalidValue;
  const size_t bytes = static_cast<size_t>(HomeExperts(p) * WeightBytes(p));
  const cudaError_t error = cudaMemsetAsync(p.out, 0, bytes, stream);
  if (error != cudaSuccess || p.out_up == nullptr) return error;
  return cudaMemsetAsync(p.out_up, 0, bytes, stream);
}

cudaError_t ClearSlackOf(cudaStream_t stream, const GroupedGemmParams& p, int processors) {
  const int64_t width = p.product == GemmProduct::kDataGrad ? p.in_features : p.out_features;
  return LaunchClearSlack(stream, GroupsOf(p), p.num_slabs, p.out, width * BytesOf(p.out_type),
                          processors);
}

}  // namespace
}  // namespace gemm

GemmTuning TunedGemm(const GroupedGemmParams& params) {
  const bool by_expert = params.product == GemmProduct::kWeightGrad;
  // Bands for 16-bit and tf32 operands: over many steps the GPU is limited by power. Then bands
  // that read less memory beat bands that are slightly faster in short runs, by up to 7% with many
  // columns.
  int32_t band = 8;
  if (params.scaling == GemmScaling::kTensor) band = by_expert ? 2 : 1;
  if (params.scaling == GemmScaling::kBlock) band = 2;
  return {band};
}

cudaError_t LaunchGroupedGemm(cudaStream_t stream, GroupedGemmParams params) {
  const gemm::Instance* instance = gemm::FindInstance(params);
  if (instance == nullptr || !gemm::Fits(params)) return cudaErrorInvalidValue;
  const int64_t rows = gemm::RowsOf(params);
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
  if (error == cudaSuccess && params.rhs_copy != nullptr) {
    error = gemm::CopyWeights(stream, &params);
  }
  gemm::Maps maps;
  if (error == cudaSuccess) error = gemm::MakeMaps(params, &maps);
  if (error != cudaSuccess) return error;
  int32_t blocks = params.tickets.blocks;
  if (blocks == 0) blocks = processors / gemm::kClusterBlocks * gemm::kClusterBlocks;
  error = instance->launch(stream, maps, gemm::MakeArguments(params, blocks), blocks);
  if (error != cudaSuccess || !params.clear_slack || by_expert) return error;
  return gemm::ClearSlackOf(stream, params, processors);
}

}  // namespace cuda
}  // namespace ep_runtime
