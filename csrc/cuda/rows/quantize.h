// Quantizes to 8-bit floats, with the same bits as `ops/quantize/plain.py`.
//
// Letters: S slabs of C rows, W values of a row, G experts. amax is the largest finite magnitude;
// values below 2^-126 count as 0. Data are value * (1 / scale), rounded to nearest even,
// saturating. Values that are not finite stay not finite and keep their sign.
//
// Slack rows are not read. With clear_slack their results are zeros with scales of 1; otherwise
// their results are undefined.
#ifndef EP_RUNTIME_CUDA_ROWS_QUANTIZE_H_
#define EP_RUNTIME_CUDA_ROWS_QUANTIZE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/fp8_format.h"
#include "cuda/rows/row_groups.h"

namespace ep_runtime {
namespace cuda {
namespace rows {

// Calls `launch(type, format)` with both as std::integral_constant.
template <typename Launch>
cudaError_t LaunchForFp8(RowType type, Fp8Format format, const Launch& launch) {
  return LaunchForFloat(type, [&](auto constant) {
    if (format == Fp8Format::kE4M3) {
      launch(constant, std::integral_constant<Fp8Format, Fp8Format::kE4M3>{});
    } else {
      launch(constant, std::integral_constant<Fp8Format, Fp8Format::kE5M2>{});
    }
  });
}

}  // namespace rows

constexpr int kQuantizedMultiple = 8;    // W: values that a lane converts at once
constexpr int kTransposedMultiple = 16;  // K': values along K' that are stored at once
constexpr int kTile = 128;               // values along each blocked dim that share an f32 scale
constexpr int kMxTile = 32;              // values that share an e8m0 scale

struct AmaxParams {
  RowType type;
  rows::RowGroups groups;
  int32_t width;                    // W
  int32_t num_experts;              // group l of slab s is of expert (s * L + l) % num_experts
  const void* values;               // [S * C, W] type, device
  float* amax;                      // [num_experts], device
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
// Makes two launches.
cudaError_t LaunchGroupAmax(cudaStream_t stream, const AmaxParams& params);

// Computes scales from amax, one for each group.
struct GroupScalesParams {
  Fp8Format format;
  int32_t count;                    // number of groups
  const float* amax;                // [count], device
  float* scale;                     // [count], device
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
};
cudaError_t LaunchGroupScales(cudaStream_t stream, const GroupScalesParams& params);

struct QuantizeRowsParams {
  RowType type;
  Fp8Format format;
  rows::RowGroups groups;
  int32_t width;             // W
  const void* values;        // [S * C, W] type, device
  const float* group_scale;  // [S * L], device; null: each tile has its own scale
  bool power_of_two;         // true: scales of tiles are rounded to powers of two
  bool clear_slack;
  uint8_t* data;      // [S * C, W], device
  float* tile_scale;  // [S * C, ceil(W / kTile)], device; null with group_scale or packed rows
  const int32_t* wanted = nullptr;  // [1], device: 0 if there is nothing to do. Null: always runs
  // true: `data` is [S * C, W + 4 * ceil(W / kTile)] bytes, with the scales of a row's tiles after
  // the row's values. Not with clear_slack.
  bool packed = false;
};
cudaError_t LaunchQuantizeRows(cudaStream_t stream, const QuantizeRowsParams& params);

// Quantizes weights and, if `transposed` is given, also writes the same bytes with K' contiguous,
// from one read. Scales are given, or each block of kTile x kTile values gets its own; blocks at
// the end of a dim are smaller.
struct QuantizeWeightsParams {
  RowType type;
  Fp8Format format;
  int32_t count;             // G consecutive matrices
  int32_t rows;              // K'; with `transposed`, a multiple of kTransposedMultiple
  int32_t middle;            // dim between K' and N': values of one index are a matrix
  int32_t width;             // N', a multiple of kQuantizedMultiple
  const void* values;        // [G, K', middle, N'] type, device
  const float* given_scale;  // [G], device; null: each block has its own scale
  bool power_of_two;         // true: scales of blocks are rounded to powers of two
  uint8_t* data;             // like values, device
  uint8_t* transposed;       // [G, middle, N', K'], device; or null
  float* scale;  // [G, ceil(K' / kTile), middle, ceil(N' / kTile)], device; null with given_scale
};
cudaError_t LaunchQuantizeWeights(cudaStream_t stream, const QuantizeWeightsParams& params);

// Quantizes rows twice from one read: with scales of tiles along a row, and with scales of tiles
// across kMxTile rows.
struct QuantizeMxParams {
  RowType type;
  Fp8Format format;
  rows::RowGroups groups;  // C is a multiple of kMxTile
  int32_t width;           // W, a multiple of kMxTile
  const void* values;      // [S * C, W] type, device
  bool clear_slack;
  uint8_t* data;           // [S * C, W], device
  uint8_t* scale;          // [S * C, W / kMxTile] e8m0, device
  uint8_t* data_columns;   // [S * C, W], device
  uint8_t* scale_columns;  // [S * C / kMxTile, W] e8m0, device
};
cudaError_t LaunchQuantizeMx(cudaStream_t stream, const QuantizeMxParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_QUANTIZE_H_
