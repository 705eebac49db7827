// Runs dispatch, first product, activation, second product and combine as one call, forward or
// backward.
#ifndef EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_
#define EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block/workspace.h"
#include "cuda/device/device_group.h"
#include "cuda/device/side_streams.h"
#include "cuda/fp8_format.h"
#include "cuda/gemm/product/product.h"
#include "cuda/movement/combine/combine_kernels.h"
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/rows/activation.h"

namespace ep_runtime {
namespace cuda {

struct ExchangeGrids {
  DispatchGrid dispatch;
  CombineGrid combine;
};

// All pointers are device memory. Rows, weights and their gradients have type `type`: kBF16, kF16,
// or kF32, which products round to tf32.
struct BlockParams {
  DeviceGroup* group;
  CallName name;
  block::BlockSizes sizes;
  RowType type;
  ActivationFunction function;
  bool gated;
  bool early;  // true: activations are weighted; false: combine applies the weights. Backward is
               // the same
  // Settings of the group.
  int32_t num_experts;  // E
  int32_t prepare_blocks;
  ExchangeGrids alone;   // grids of exchanges that do not overlap a product
  ExchangeGrids beside;  // grids of exchanges that overlap a product
  CombinePrecision precision;
  LaneRoom room;
  SideStreams* side;  // null: nothing overlaps
  bool shares_sms;    // true: other kernels hold some SMs while the call runs

  const int32_t* topk_idx;  // [T, K]
  const void* tokens;       // [T, H]; packed: u8 [T, QuantizedRowBytes]
  const float* weights;     // [T, K]
  const int32_t* most;      // [1]
  Plan plan;                // plan of all tokens, with C rows
  // [N, S]: the expert of each slot of each rank, -1 if it has none. Null: no experts are copied.
  // Otherwise the arrays of weights below, and their gradients, have L - S experts. Biases and
  // scales have L.
  const int32_t* copies;
  int32_t max_tokens;   // of a rank, in any call of the group
  const void* wi;       // [L, H, N]; if gate and up are a pair, the gate [L, H, M]
  const void* wi_up;    // [L, H, M] up, if they are a pair, else null
  const void* wo;       // [L, M, H]
  const void* wi_bias;  // [L, N] or null
  const void* wo_bias;  // [L, H] or null; null with `early`, which would not weight it
  FloatType bias_type;  // type of wi_bias
  FloatType wo_bias_type;
  // If `sizes.scaling` is not kNone, weights are e4m3 with a contiguous contracted dim: forward wi
  // is [L, N, H] and wo [L, H, M], backward wi [L, H, N] and wo as above. wi is not a pair.
  const float* wi_scale;  // kTensor: [L]; kBlock: [L, ceil(H / 128), ceil(N / 128)]
  const float* wo_scale;  // likewise
  Fp8Format gradients;    // format of rows' gradients
  bool power_of_two;      // true: scales of blocks are rounded to powers of two
  // [kept rows, N]: saves the first product. Forward fills `kept` if the rows fit. Backward reads
  // it, or computes the first product again.
  void* kept;
  const int32_t* made;  // [1], backward: 0 if forward did not fill `kept`; null: forward did
  uint8_t* workspace;

  void* y;                // [T, H] type, or f32 if `wide`: forward
  const void* dy;         // [T, H] type, or packed without wo_bias: for backward, like the fields
                          // below
  void* dx;               // [T, H], type like y
  float* d_weights;       // [T, K]
  FloatType weight_type;  // type of the next three: the rows' type, or kF32
  void* dwi;              // [L, H, N]; of a pair only the gate, like wi; null, like dwo, if unused
  void* dwi_up;           // like wi_up
  void* dwo;
  float* d_wi_bias;  // [L, N] with wi_bias, else null
  float* d_wo_bias;  // [L, H] with wo_bias, else null
  bool wide;
  bool adds;  // true: gradients of weights and biases are added to what is there
};

// Makes every launch that any routing may need, because the host does not know the routing.
// Launches that are not wanted return at once. Returns cudaErrorInvalidValue if a limit of one of
// the kernels does not hold.
cudaError_t LaunchBlock(cudaStream_t stream, const BlockParams& params);
cudaError_t LaunchBlockBwd(cudaStream_t stream, const BlockParams& params);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_BLOCK_CALL_H_
