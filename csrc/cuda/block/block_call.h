// Dispatch, both products, what stands between them, and combine: one call, forward or backward.
#ifndef EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_
#define EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block/workspace.h"
#include "cuda/device/device_group.h"
#include "cuda/device/side_streams.h"
#include "cuda/gemm/product/product.h"
#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/rows/activation.h"
#include "cuda/rows/quantize.h"

namespace ep_runtime {
namespace cuda {

struct ExchangeGrids {
  DispatchGrid dispatch;
  CombineGrid combine;
};

// All memory is of the device; rows, weights and their gradients are of `type`: kBF16, kF16, or
// kF32, which products round to tf32.
struct BlockParams {
  DeviceGroup* group;
  CallName name;
  block::BlockSizes sizes;
  RowType type;
  ActivationFunction function;
  bool gated;
  bool early;  // slots' weights multiply activations; else combine does. Backward alike in both
  // Of the group.
  int32_t num_experts;  // E
  int32_t prepare_blocks;
  ExchangeGrids alone;   // of exchanges that nothing of the call runs beside
  ExchangeGrids beside;  // of the others
  CombinePrecision precision;
  LaneRoom room;
  SideStreams* side;  // null: exchanges run beside nothing

  const int32_t* topk_idx;  // [T, K]
  const void* tokens;       // [T, H]
  const float* weights;     // [T, K]
  const int32_t* most;      // [1]
  Plan plan;                // of all tokens, with C rows
  const void* wi;           // [L, H, N]; of a pair the gate, [L, H, M]
  const void* wi_up;        // [L, H, M] of a pair, else null
  const void* wo;           // [L, M, H]
  const void* wi_bias;      // [L, N] or null
  const void* wo_bias;      // [L, H] or null; not with `early`, as it is weighted too
  FloatType bias_type;      // of wi_bias
  FloatType wo_bias_type;
  // Where `sizes.scaling` is not kNone weights are e4m3, as wanted along memory: forward wi is
  // [L, N, H] and wo [L, H, M], backward wi [L, H, N] and wo as above. wi is no pair.
  const float* wi_scale;  // kTensor: [L]; kBlock: [L, ceil(H / 128), ceil(N / 128)]
  const float* wo_scale;  // likewise
  Fp8Format gradients;    // of rows' gradients
  bool power_of_two;      // scales of blocks
  // [kept rows, N] the first product: a result of forward, which fills the rows there are where
  // they fit, and an operand of backward, which makes it again where they do not.
  void* kept;
  const int32_t* made;  // [1], backward: 0 where nobody made what `kept` is to hold; null: made
  uint8_t* workspace;

  void* y;                // [T, H] type, or f32 where `wide`: forward
  const void* dy;         // [T, H] type: backward, and what follows
  void* dx;               // [T, H] as y
  float* d_weights;       // [T, K]
  FloatType weight_type;  // of the next three: of rows, or kF32 of 8-bit products
  void* dwi;              // as wi, [L, H, N]; two of a pair; null, as dwo, where nobody wants it
  void* dwi_up;           // as wi_up
  void* dwo;
  float* d_wi_bias;  // [L, N] with wi_bias, else null
  float* d_wo_bias;  // [L, H] with wo_bias, else null
  bool wide;
};

// Every launch is made whatever the routing, as no host knows it; those that are not wanted return
// at once. cudaErrorInvalidValue: a limit of one of the parts does not hold.
cudaError_t LaunchBlock(cudaStream_t stream, const BlockParams& params);
cudaError_t LaunchBlockBwd(cudaStream_t stream, const BlockParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_
