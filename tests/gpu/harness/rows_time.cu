// Times of kernels that visit rows, by the bytes that they must at least move, next to copies in
// the same run.
#include <algorithm>
#include <memory>

#include "cuda/rows/activation_quantize.h"
#include "cuda/rows/group_sums.h"
#include "cuda/rows/move_rows.h"
#include "cuda/rows/scaled_sums.h"
#include "rows_case.h"

namespace rows_test {
namespace {

constexpr int kRows = 32768;
constexpr int kGroups = 32;
constexpr int kHidden = 7168;
constexpr int kInner = 2048;
constexpr int kTopK = 8;
constexpr int kThreads = 256;

__global__ void CopyVectors(const uint4* from, uint4* to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    to[i] = from[i];
  }
}

__global__ void FillValues(__nv_bfloat16* values, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    const uint32_t bits = static_cast<uint32_t>(i) * 0x9E3779B1u;
    values[i] = __float2bfloat16(static_cast<float>(bits >> 8) * 1e-7f - 0.8f);
  }
}

double MedianMs(const std::function<cudaError_t()>& launch) {
  constexpr int kWarm = 3, kRuns = 15;
  cudaEvent_t events[kRuns + 1];
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < kWarm; ++i) CHECK_CUDA(launch());
  CHECK_CUDA(cudaEventRecord(events[0]));
  for (int i = 0; i < kRuns; ++i) {
    CHECK_CUDA(launch());
    CHECK_CUDA(cudaEventRecord(events[i + 1]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(kRuns);
  for (int i = 0; i < kRuns; ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  std::sort(times.begin(), times.end());
  return times[kRuns / 2];
}

class Timer {
 public:
  // Prints GB/s of a copy of as many bytes as most of the kernels move.
  void Copies() {
    const Memory from(kCopied), to(kCopied);
    const int64_t vectors = kCopied / static_cast<int64_t>(sizeof(uint4));
    Print("copy: a kernel", 2.0 * kCopied, [&] {
      CopyVectors<<<132 * 16, kThreads>>>(from.as<uint4>(), to.as<uint4>(), vectors);
      return cudaGetLastError();
    });
    copy_ = last_;
    Print("copy: cudaMemcpyAsync", 2.0 * kCopied, [&] {
      return cudaMemcpyAsync(to.as(), from.as(), kCopied, cudaMemcpyDeviceToDevice, nullptr);
    });
    copy_ = std::max(copy_, last_);
  }
  void Print(const std::string& what, double bytes, const std::function<cudaError_t()>& launch) {
    const double ms = MedianMs(launch);
    last_ = bytes / ms * 1e-6;
    std::printf("%-52s %8.4f ms %7.0f GB/s", what.c_str(), ms, last_);
    if (copy_ > 0) std::printf("  %5.1f%% of copy", 100 * last_ / copy_);
    std::printf("\n");
  }

 private:
  static constexpr int64_t kCopied = 512ll << 20;
  double copy_ = 0;
  double last_ = 0;
};

struct Load {
  const char* name;
  int rows;  // C
  std::vector<int> sizes;
};

std::vector<Load> Loads() {
  std::vector<int> zipf(kGroups), even(kGroups, kRows / kGroups);
  double sum = 0;
  for (int g = 0; g < kGroups; ++g) sum += 1.0 / (g + 1);
  int left = kRows;
  for (int g = kGroups - 1; g >= 0; --g) {
    zipf[g] = g == 0 ? left : static_cast<int>(kRows / (g + 1) / sum);
    left -= zipf[g];
  }
  return {{"even", kRows, even}, {"zipf", kRows, zipf}, {"half empty", 2 * kRows, even}};
}

std::unique_ptr<Memory> Values(int64_t count) {
  auto memory = std::make_unique<Memory>(count * 2);
  FillValues<<<132 * 16, kThreads>>>(memory->as<__nv_bfloat16>(), count);
  CHECK_CUDA(cudaGetLastError());
  return memory;
}

// The bytes of one pass are bytes read and bytes written.
void TimeActivation(Timer* timer, const Load& load, const Slabs& slabs, const Memory& sizes) {
  const int64_t all = slabs.all_rows();
  const auto hidden = Values(all * 2 * kInner), grad = Values(all * kInner);
  const Memory weights(std::vector<float>(all, 0.5f)), d_weights(all * 4);
  const Memory out(all * 2 * kInner * 2);
  ec::ActivationParams params{};
  params.type = RowType::kBF16;
  params.gated = true;
  params.groups = slabs.On(sizes);
  params.width = kInner;
  params.hidden = hidden->as();
  params.weights = weights.as<float>();
  params.out = out.as();
  const double row = slabs.used * kInner * 2.0;
  timer->Print(std::string("SwiGLU forward, ") + load.name, 3 * row,
               [&] { return ec::LaunchActivation(nullptr, params); });
  params.grad = grad->as();
  params.out = hidden->as();
  params.d_weights = d_weights.as<float>();
  timer->Print(std::string("SwiGLU backward, ") + load.name, 5 * row,
               [&] { return ec::LaunchActivation(nullptr, params); });
}

// Times activation and quantization in one kernel, and its share of the separate kernels' time.
void TimeFused(Timer* timer, const Load& load, const Slabs& slabs, const Memory& sizes) {
  const int64_t all = slabs.all_rows();
  const auto hidden = Values(all * 2 * kInner), grad = Values(all * kInner);
  const Memory weights(std::vector<float>(all, 0.5f)), d_weights(all * 4), amax(4 * kGroups);
  const Memory scales(std::vector<float>(kGroups, 0.01f)), data(all * 2 * kInner);
  const Memory tile_scale(all * (2 * kInner / ec::kTile) * 4);
  ec::QuantizedActivationParams params{};
  params.type = RowType::kBF16;
  params.gated = true;
  params.groups = slabs.On(sizes);
  params.width = kInner;
  params.hidden = hidden->as();
  params.weights = weights.as<float>();
  params.num_experts = kGroups;
  params.data = data.as<uint8_t>();
  const double row = static_cast<double>(slabs.used) * kInner;
  for (const bool backward : {false, true}) {
    params.grad = backward ? grad->as() : nullptr;
    params.d_weights = backward ? d_weights.as<float>() : nullptr;
    const double read = backward ? 6 * row : 4 * row, made = backward ? 2 * row : row;
    const auto print = [&](const char* what, double bytes) {
      timer->Print(std::string(backward ? "SwiGLU backward " : "SwiGLU ") + what + load.name, bytes,
                   [&] { return ec::LaunchQuantizedActivation(nullptr, params); });
    };
    params.amax = amax.as<float>();
    print("to amax, ", read);
    params.amax = nullptr;
    params.group_scale = scales.as<float>();
    params.tile_scale = nullptr;
    print("and tensor scales, ", read + made);
    params.group_scale = nullptr;
    params.tile_scale = tile_scale.as<float>();
    print("and 1 x 128, ", read + made * (1 + 1.0 / 32));
  }
}

void TimeQuantize(Timer* timer, const Load& load, const Slabs& slabs, const Memory& sizes) {
  const int64_t all = slabs.all_rows(), values = all * kHidden;
  const auto x = Values(values);
  const Memory data(values), columns(values), scale(all * (kHidden / 8)), column_scale(all * 4096);
  const Memory amax(4 * kGroups), ones(std::vector<float>(kGroups, 0.01f));
  const double used = static_cast<double>(slabs.used) * kHidden;
  const auto name = [&](const char* what) { return std::string(what) + ", " + load.name; };
  const Memory sums(int64_t{kGroups} * kHidden * 4);
  ec::GroupSumsParams bias{};
  bias.type = RowType::kBF16;
  bias.groups = slabs.On(sizes);
  bias.width = kHidden;
  bias.num_experts = kGroups;
  bias.values = x->as();
  bias.sums = sums.as<float>();
  timer->Print(name("gradient of a bias"), 2 * used,
               [&] { return ec::LaunchGroupSums(nullptr, bias); });
  const ec::AmaxParams largest{RowType::kBF16, slabs.On(sizes), kHidden,
                               kGroups,        x->as(),         amax.as<float>()};
  timer->Print(name("amax of groups"), 2 * used,
               [&] { return ec::LaunchGroupAmax(nullptr, largest); });
  for (const bool clear : {false, true}) {
    // With `clear` zeros of the slack are work too.
    const double zeros = clear ? static_cast<double>(values) - used : 0.0;
    if (clear && zeros == 0.0) continue;
    const char* const also = clear ? ", slack cleared" : "";
    ec::QuantizeRowsParams rows{RowType::kBF16,
                                Fp8Format::kE4M3,
                                slabs.On(sizes),
                                kHidden,
                                x->as(),
                                ones.as<float>(),
                                false,
                                clear,
                                data.as<uint8_t>(),
                                nullptr};
    timer->Print(name("quantize by tensor scales") + also, 3 * used + zeros,
                 [&] { return ec::LaunchQuantizeRows(nullptr, rows); });
    rows.group_scale = nullptr;
    rows.tile_scale = scale.as<float>();
    timer->Print(name("quantize 1 x 128") + also, 3 * used + (used + zeros) / 32 + zeros,
                 [&] { return ec::LaunchQuantizeRows(nullptr, rows); });
    const ec::QuantizeMxParams mx{RowType::kBF16,
                                  Fp8Format::kE4M3,
                                  slabs.On(sizes),
                                  kHidden,
                                  x->as(),
                                  clear,
                                  data.as<uint8_t>(),
                                  scale.as<uint8_t>(),
                                  columns.as<uint8_t>(),
                                  column_scale.as<uint8_t>()};
    timer->Print(name("quantize MX, both ways") + also, 4 * used + 2 * zeros,
                 [&] { return ec::LaunchQuantizeMx(nullptr, mx); });
  }
}

void TimeKernels(Timer* timer) {
  constexpr int kWide = 2 * kInner;
  const int64_t values = int64_t{kGroups} * kHidden * kWide;
  const auto w = Values(values);
  const Memory data(values), scale(values / 4096);
  const Memory transposed(values), given(std::vector<float>(kGroups, 0.01f));
  ec::QuantizeWeightsParams both{
      RowType::kBF16, Fp8Format::kE4M3,   kGroups, kHidden,          1, kWide, w->as(), nullptr,
      false,          data.as<uint8_t>(), nullptr, scale.as<float>()};
  timer->Print("quantize 128 x 128, 32 weights", 3.0 * values,
               [&] { return ec::LaunchQuantizeWeights(nullptr, both); });
  both.transposed = transposed.as<uint8_t>();
  timer->Print("quantize 128 x 128 in both layouts, 32 weights", 4.0 * values,
               [&] { return ec::LaunchQuantizeWeights(nullptr, both); });
  both.given_scale = given.as<float>();
  both.scale = nullptr;
  timer->Print("quantize by tensor scales in both layouts, 32 weights", 4.0 * values,
               [&] { return ec::LaunchQuantizeWeights(nullptr, both); });
}

void TimeMoves(Timer* timer) {
  constexpr int kTokens = kRows / kTopK;
  std::mt19937 random(3);
  std::vector<int> source(kRows), slot_row(kRows);
  for (int i = 0; i < kRows; ++i) source[i] = i;
  std::shuffle(source.begin(), source.end(), random);
  for (int row = 0; row < kRows; ++row) slot_row[source[row]] = row;
  const Memory sources(source), slot_rows(slot_row), weights(std::vector<float>(kRows, 0.5f));
  const auto tokens = Values(int64_t{kTokens} * kHidden), rows = Values(int64_t{kRows} * kHidden);
  const Memory out(rows->bytes()), products(4 * kRows);
  const double bytes = 2.0 * kHidden * kRows;
  ec::GatherRowsParams gather{
      RowType::kBF16, kRows,   kTokens, kTopK,    2 * kHidden, sources.as<int>(),
      tokens->as(),   nullptr, nullptr, out.as(), nullptr};
  const auto run = [&] { return ec::LaunchGatherRows(nullptr, gather); };
  timer->Print("permute, top 8", bytes + bytes / kTopK, run);
  ec::SpreadRowsParams spread{};
  spread.type = RowType::kBF16;
  spread.rows = kRows;
  spread.tokens = kTokens;
  spread.slots = kTopK;
  spread.row_bytes = 2 * kHidden;
  spread.source = sources.as<int>();
  spread.slot_row = slot_rows.as<int>();
  spread.values = tokens->as();
  spread.out = out.as();
  const auto run_spread = [&] { return ec::LaunchSpreadRows(nullptr, spread); };
  timer->Print("permute by tokens, top 8", bytes + bytes / kTopK, run_spread);
  spread.weights = weights.as<float>();
  timer->Print("permute by tokens with weights", bytes + bytes / kTopK, run_spread);
  spread.others = rows->as();
  spread.products = products.as<float>();
  timer->Print("gradients of unpermute by tokens", 2 * bytes + bytes / kTopK, run_spread);
  gather.weights = weights.as<float>();
  timer->Print("permute with weights", bytes + bytes / kTopK, run);
  gather.others = rows->as();
  gather.products = products.as<float>();
  timer->Print("gradients of unpermute", 2 * bytes + bytes / kTopK, run);
  ec::SumRowsParams sum{RowType::kBF16,      kTokens,    kTopK,   kRows,   2 * kHidden,
                        slot_rows.as<int>(), rows->as(), nullptr, out.as()};
  timer->Print("unpermute, top 8", bytes + bytes / kTopK,
               [&] { return ec::LaunchSumRows(nullptr, sum); });
  sum.weights = weights.as<float>();
  timer->Print("unpermute with weights", bytes + bytes / kTopK,
               [&] { return ec::LaunchSumRows(nullptr, sum); });
  // The same rows as bytes, with any floats as scales.
  const int64_t scales = int64_t{kRows} * (kHidden / ec::kTile) * 4;
  const Memory scale(scales);
  const ec::SumScaledRowsParams scaled{
      RowType::kBF16,      kTokens,           kTopK,   kRows, kHidden, slot_rows.as<int>(),
      rows->as<uint8_t>(), scale.as<float>(), out.as()};
  timer->Print("sums of 8 bits, top 8", bytes / 2 + scales + bytes / kTopK,
               [&] { return ec::LaunchSumScaledRows(nullptr, scaled); });
}

}  // namespace

void TimeAll() {
  Timer timer;
  timer.Copies();
  for (const Load& load : Loads()) {
    const Slabs slabs(1, load.rows, load.sizes);
    const Memory sizes(slabs.sizes);
    TimeActivation(&timer, load, slabs, sizes);
    TimeFused(&timer, load, slabs, sizes);
    TimeQuantize(&timer, load, slabs, sizes);
  }
  TimeKernels(&timer);
  TimeMoves(&timer);
}

}  // namespace rows_test
