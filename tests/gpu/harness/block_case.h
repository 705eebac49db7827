// One block call's arrays on every rank, filled on the devices, and the launches of its calls.
#ifndef EP_RUNTIME_TESTS_GPU_BLOCK_CASE_H_
#define EP_RUNTIME_TESTS_GPU_BLOCK_CASE_H_

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "case_runner.h"
#include "cuda/block/block_call.h"

namespace gpu_test {

constexpr int kRowAlignment = 1;  // like ROW_ALIGNMENT of ep_runtime/workspace.py

struct BlockShape {
  const char* name;
  int ranks, tokens, hidden, inner, experts, top_k;
  double room;            // rows of the workspace, in even shares
  double kept;            // rows that save the first product, in even shares; 0: none
  bool one_rank = false;  // all slots go to the first rank's experts
  ec::GemmScaling scaling = ec::GemmScaling::kNone;
  RowType type = RowType::kBF16;  // or kF32
  // If smaller, calls run in chunks whose sums fit this many rows of a lane, as between nodes.
  int lane_rows = INT32_MAX;

  int64_t element_bytes() const { return ElementBytes(type); }
};

// How exchanges run: alone or overlapping, and on which grids.
struct Way {
  bool overlaps;
  ec::DispatchGrid dispatch{12, 28};
  ec::CombineGrid combine{24, 16};
  ec::ExchangeGrids alone{{20, 44}, {38, 26}};
};

// Fills with bfloat16, or with f32 if elements have 4 bytes.
static __global__ void FillRandom(void* out, int element_bytes, uint32_t what, float scale,
                                  int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u ^ static_cast<uint32_t>(i >> 32) ^ what;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    const float value = scale * (static_cast<int32_t>(x ^ x >> 16) * 0x1p-31f);
    if (element_bytes == 4) {
      static_cast<float*>(out)[i] = value;
    } else {
      static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
    }
  }
}

// Makes bytes finite e4m3 below 2 in magnitude.
static __global__ void MakeFinite(uint8_t* bytes, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    bytes[i] = (bytes[i] ^ static_cast<uint8_t>(i * 37)) & 0xBF;
  }
}

class BlockCase {
 public:
  BlockCase(World& world, const BlockShape& shape)
      : world_(world),
        shape_(shape),
        c_{shape.name,    shape.ranks, shape.tokens,    shape.hidden, shape.top_k,
           shape.experts, 8,           Capacity(shape), shape.type,   0,
           true},
        ranks_(shape.ranks) {
    sides_.resize(shape.ranks);
    for (int r = 0; r < shape.ranks; ++r) Fill(r);
    world_.Synchronize();
  }

  static int Capacity(const BlockShape& s) {
    const int local = s.experts / s.ranks;
    const int64_t rows = int64_t{s.ranks} * s.tokens * std::min(s.top_k, local);
    return static_cast<int>(ep_runtime::AlignUp(rows + 7 * local, 128));
  }

  void Prepare(int r) {
    world_.Use(r);
    Arrays& d = ranks_[r];
    ec::PrepareParams params{};
    params.group = world_.group(r);
    params.name = {0x77, nullptr, 0};
    params.sizes = {c_.tokens, c_.top_k, c_.capacity, Local(), c_.width};
    params.num_experts = c_.experts;
    params.alignment = c_.alignment;
    params.row_alignment = kRowAlignment;
    params.topk_idx = d.idx->as<int32_t>();
    params.plan = d.plan->buffers<int32_t>();
    params.most = d.most->as<int32_t>();
    params.room = ep_runtime::LaneLayout(world_.sizes()).room;
    CHECK_CUDA(ec::LaunchPrepare(world_.stream(r), params));
    if (shape_.lane_rows == INT32_MAX) return;
    CHECK_CUDA(cudaMemsetAsync(params.most, 0x7F, 4, world_.stream(r)));
  }
  void Forward(int r, const Way& way) {
    world_.Use(r);
    CHECK_CUDA(ec::LaunchBlock(world_.stream(r), Params(r, way)));
  }
  void Backward(int r, const Way& way) {
    world_.Use(r);
    CHECK_CUDA(ec::LaunchBlockBwd(world_.stream(r), Params(r, way)));
  }
  void Enqueue(int r, const Way& way) {
    Prepare(r);
    Forward(r, way);
    Backward(r, way);
  }

  // Tokens of a chunk, if a call runs in chunks.
  int ChunkTokens() const { return ec::block::ChunkTokens(Sizes()); }
  // Runs only the first chunk of a call, like a rank that dies in the second.
  void ForwardFirstPart(int r) {
    world_.Use(r);
    ec::BlockParams block = Params(r, {false});
    block.sizes.tokens = ChunkTokens();
    CHECK_CUDA(ec::LaunchBlock(world_.stream(r), block));
  }

  // Runs only backward's first exchange, like a rank that dies after it. Not with 8-bit products.
  void DispatchGrads(int r) {
    world_.Use(r);
    const ec::BlockParams block = Params(r, {false});
    ec::block::Workspace regions;
    ec::block::LayOut(block.sizes, /*backward=*/true, block.workspace, &regions);
    ec::CombineBwdParams params{};
    params.group = block.group;
    params.name = block.name;
    params.sizes = {c_.tokens, c_.top_k, block.sizes.rows, Local(), c_.width};
    params.type = block.type;
    params.row_bytes = static_cast<int32_t>(c_.width * shape_.element_bytes());
    params.grad = block.dy;
    params.plan = block.plan;
    params.d_expert_out = regions.grads;
    params.grid = block.alone.dispatch;
    params.room = block.room;
    params.clear_slack = false;
    CHECK_CUDA(ec::LaunchCombineBwd(world_.stream(r), params));
  }

  // y, dx, d_weights, dwi and dwo of every rank.
  std::vector<std::vector<uint16_t>> Results() {
    std::vector<std::vector<uint16_t>> found;
    for (int r = 0; r < c_.ranks; ++r) {
      world_.Use(r);
      Arrays& d = ranks_[r];
      for (Buffer* each : {&d.y, &d.dx, &d.d_weights, &d.dwi, &d.dwo}) {
        found.push_back((*each)->read<uint16_t>());
      }
    }
    return found;
  }
  // Poisons results, so that missing writes show.
  void Poison() {
    for (int r = 0; r < c_.ranks; ++r) {
      world_.Use(r);
      Arrays& d = ranks_[r];
      const int64_t tokens = TokenBytes();
      CHECK_CUDA(cudaMemset(d.y->as<void>(), 0xFF, tokens));
      CHECK_CUDA(cudaMemset(d.dx->as<void>(), 0xFF, tokens));
      CHECK_CUDA(cudaMemset(d.d_weights->as<void>(), 0xFF, int64_t{c_.tokens} * c_.top_k * 4));
      CHECK_CUDA(cudaMemset(d.dwi->as<void>(), 0xFF, WeightBytes() * 2));
      CHECK_CUDA(cudaMemset(d.dwo->as<void>(), 0xFF, WeightBytes()));
    }
    world_.Synchronize();
  }

 private:
  struct Arrays {
    Buffer idx, tokens, weights, dy, wi, wo, scales, most, workspace, kept, y, dx, d_weights, dwi,
        dwo;
    std::unique_ptr<Plan> plan;
  };

  int Local() const { return c_.experts / c_.ranks; }
  // Bytes of one half of the first weight.
  int64_t WeightBytes() const {
    return int64_t{Local()} * shape_.inner * c_.width * shape_.element_bytes();
  }
  int64_t TokenBytes() const { return int64_t{c_.tokens} * c_.width * shape_.element_bytes(); }

  ec::block::BlockSizes Sizes() const {
    const auto share = [&](double factor) {
      const double rows = factor * c_.tokens * c_.top_k;
      const int64_t least = Local() + int64_t{c_.ranks} * c_.top_k;
      return static_cast<int32_t>(std::min<int64_t>(
          c_.capacity,
          ep_runtime::AlignUp(std::max<int64_t>(least, static_cast<int64_t>(rows)), 128)));
    };
    ec::block::BlockSizes sizes{};
    sizes.tokens = c_.tokens;
    sizes.top_k = c_.top_k;
    sizes.capacity = c_.capacity;
    sizes.experts = Local();
    sizes.hidden = c_.width;
    sizes.inner = shape_.inner;
    sizes.columns = 2 * shape_.inner;
    sizes.ranks = c_.ranks;
    sizes.alignment = kRowAlignment;
    sizes.rows = share(shape_.room);
    sizes.kept_rows = shape_.kept == 0 ? 0 : std::min(sizes.rows, share(shape_.kept));
    sizes.element_bytes = static_cast<int32_t>(shape_.element_bytes());
    sizes.scaling = shape_.scaling;
    sizes.lane_rows = shape_.lane_rows;
    return sizes;
  }

  ec::BlockParams Params(int r, const Way& way) {
    Arrays& d = ranks_[r];
    ec::BlockParams p{};
    p.group = world_.group(r);
    p.name = {0x77, nullptr, 0};
    p.sizes = Sizes();
    p.type = shape_.type;
    p.function = ec::ActivationFunction::kSilu;
    p.gated = p.early = true;
    p.num_experts = c_.experts;
    p.prepare_blocks = 32;
    p.alone = way.alone;
    p.beside = {way.dispatch, way.combine};
    p.room = ep_runtime::LaneLayout(world_.sizes()).room;
    p.side = way.overlaps ? sides_[r].get() : nullptr;
    p.topk_idx = d.idx->as<int32_t>();
    p.tokens = d.tokens->as<void>();
    p.weights = d.weights->as<float>();
    p.most = d.most->as<int32_t>();
    p.plan = d.plan->buffers<const int32_t>();
    p.wi = d.wi->as<void>();
    p.wo = d.wo->as<void>();
    p.weight_type = shape_.type == RowType::kF32 ? ec::FloatType::kF32 : ec::FloatType::kBF16;
    p.gradients = ec::Fp8Format::kE5M2;
    p.wi_scale = p.wo_scale = d.scales->as<float>();
    p.kept = p.sizes.kept_rows > 0 ? d.kept->as<void>() : nullptr;
    p.workspace = d.workspace->as<uint8_t>();
    p.y = d.y->as<void>();
    p.dy = d.dy->as<void>();
    p.dx = d.dx->as<void>();
    p.d_weights = d.d_weights->as<float>();
    p.dwi = d.dwi->as<void>();
    p.dwo = d.dwo->as<void>();
    return p;
  }

  std::vector<int32_t> Indices(int r) const {
    std::mt19937 random(100 + r);
    const int most = shape_.one_rank ? Local() : c_.experts;
    std::vector<int32_t> idx(int64_t{c_.tokens} * c_.top_k);
    for (int t = 0; t < c_.tokens; ++t) {
      int32_t* at = &idx[int64_t{t} * c_.top_k];
      for (int k = 0; k < c_.top_k; ++k) {
        do {
          at[k] = static_cast<int32_t>(random() % most);
        } while (std::find(at, at + k, at[k]) != at + k);
      }
    }
    return idx;
  }

  Buffer Random(int64_t bytes, uint32_t what, float scale) {
    Buffer made = std::make_unique<Memory>(bytes);
    const int element = static_cast<int>(shape_.element_bytes());
    FillRandom<<<512, 256>>>(made->as<void>(), element, what * 0x27D4EB2Fu, scale, bytes / element);
    CHECK_CUDA(cudaGetLastError());
    return made;
  }

  void Fill(int r) {
    world_.Use(r);
    Arrays& d = ranks_[r];
    const auto bytes = [](int64_t count) { return std::make_unique<Memory>(count); };
    const ec::block::BlockSizes sizes = Sizes();
    const int64_t tokens = TokenBytes();
    const float wi_scale = 2.0f / std::sqrt(static_cast<float>(c_.width));
    d.idx = std::make_unique<Memory>(Indices(r));
    d.weights = std::make_unique<Memory>(
        std::vector<float>(int64_t{c_.tokens} * c_.top_k, 1.0f / static_cast<float>(c_.top_k)));
    d.tokens = Random(tokens, 10 + r, 1);
    d.dy = Random(tokens, 20 + r, 1);
    d.wi = Random(WeightBytes() * 2, 30 + r, wi_scale);
    d.wo = Random(WeightBytes(), 40 + r, 2.0f / std::sqrt(static_cast<float>(shape_.inner)));
    // Large enough for scales of any kind. Products without scales do not read them.
    const int64_t blocks = int64_t{Local()} * (c_.width + 127) / 128 * (2 * shape_.inner + 127);
    d.scales = std::make_unique<Memory>(std::vector<float>(blocks, wi_scale));
    if (shape_.scaling != ec::GemmScaling::kNone) {
      MakeFinite<<<512, 256>>>(d.wi->as<uint8_t>(), WeightBytes() * 2);
      MakeFinite<<<512, 256>>>(d.wo->as<uint8_t>(), WeightBytes());
      CHECK_CUDA(cudaGetLastError());
    }
    d.most = bytes(4);
    ec::block::Workspace regions;
    d.workspace = bytes(std::max(ec::block::LayOut(sizes, false, nullptr, &regions),
                                 ec::block::LayOut(sizes, true, nullptr, &regions)));
    d.kept = bytes(int64_t{sizes.kept_rows} * sizes.columns * sizes.element_bytes);
    d.y = bytes(tokens);
    d.dx = bytes(tokens);
    d.d_weights = bytes(int64_t{c_.tokens} * c_.top_k * 4);
    d.dwi = bytes(WeightBytes() * 2);
    d.dwo = bytes(WeightBytes());
    d.plan = std::make_unique<Plan>(c_);
    sides_[r] = std::make_unique<ec::SideStreams>();
    CHECK_CUDA(sides_[r]->Open());
  }

  World& world_;
  BlockShape shape_;
  Case c_;
  std::vector<Arrays> ranks_;
  std::vector<std::unique_ptr<ec::SideStreams>> sides_;
};

}  // namespace gpu_test

#endif  // EP_RUNTIME_TESTS_GPU_BLOCK_CASE_H_
