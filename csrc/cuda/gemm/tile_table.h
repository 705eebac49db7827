// Which tile a product takes: what measured best on an H200, by shape class.
//
// `gemm_main tune` times every choice and prints the best of each class as rows of this table.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_TABLE_H_
#define EP_RUNTIME_CUDA_GEMM_TILE_TABLE_H_

#include <cstdint>

#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int32_t kFewRows = 512;  // of a group, C / L: the device alone knows more
constexpr int32_t kAnyRows = INT32_MAX;

struct TileChoice {
  GemmProduct product;
  GemmScaling scaling;
  int32_t most_rows;  // of a group
  GemmTuning tuning;  // tile_columns, band, queued, promoted
};

// The first row that fits counts.
constexpr TileChoice kTileTable[] = {
    // In steps that follow each other power is short: bands that read memory less beat those that
    // are a little faster for a while, by up to 7% where there are many columns.
    {GemmProduct::kForward, GemmScaling::kNone, kAnyRows, {256, 8, false, false}},
    {GemmProduct::kDataGrad, GemmScaling::kNone, kAnyRows, {256, 8, false, false}},
    {GemmProduct::kWeightGrad, GemmScaling::kNone, kAnyRows, {256, 8, false, false}},
    // Where a GPU is at its limit of power f32 sums cost nothing, and 8% where it is cool.
    {GemmProduct::kForward, GemmScaling::kTensor, kAnyRows, {256, 1, true, true}},
    {GemmProduct::kDataGrad, GemmScaling::kTensor, kAnyRows, {256, 1, true, true}},
    {GemmProduct::kWeightGrad, GemmScaling::kTensor, kAnyRows, {256, 2, true, true}},
    {GemmProduct::kForward, GemmScaling::kBlock, kAnyRows, {256, 2, true, true}},
    {GemmProduct::kDataGrad, GemmScaling::kBlock, kAnyRows, {256, 2, true, true}},
    {GemmProduct::kWeightGrad, GemmScaling::kBlock, kAnyRows, {256, 2, true, true}},
};

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_TABLE_H_
