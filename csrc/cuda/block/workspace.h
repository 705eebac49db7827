// The memory that a block call works in: W rows between its exchanges whatever the routing, and the
// plan of a chunk (`part` in code) if more rows arrive. XLA owns it, and nothing in it outlives the
// call.
//
// Letters: T tokens, K slots of one, H hidden, M inner, N columns of the first product (2 * M if it
// is gated), L experts of this rank, R ranks, C the plan's rows, W rows of the workspace.
#ifndef EP_RUNTIME_CUDA_BLOCK_WORKSPACE_H_
#define EP_RUNTIME_CUDA_BLOCK_WORKSPACE_H_

#include <cstdint>

#include "cuda/device/device_group.h"
#include "cuda/gemm/product/product.h"

namespace ep_runtime {
namespace cuda {
namespace block {

struct BlockSizes {
  int32_t tokens;    // T
  int32_t top_k;     // K
  int32_t capacity;  // C
  int32_t experts;   // L
  int32_t hidden;    // H
  int32_t inner;     // M
  int32_t columns;   // N
  int32_t ranks;     // R
  int32_t alignment;
  int32_t rows;       // W
  int32_t kept_rows;  // rows of the result that saves the first product; 0: none
  int32_t element_bytes;
  GemmScaling scaling = GemmScaling::kNone;  // not kNone: products take 8-bit operands
  int32_t lane_rows = INT32_MAX;  // rows of a lane, which the sums of a rank's tokens arrive in
  bool packed = false;  // the rows to send are quantized already; only with SendsQuantized
};

// Whether exchanges carry rows as 8-bit operands, followed by their block scales. True if each
// token is quantized alone and its scales fill whole copies.
bool SendsQuantized(const BlockSizes& sizes);
// Bytes of such a row.
int64_t QuantizedRowBytes(const BlockSizes& sizes);

// Tokens of a chunk: so few that no routing brings any rank more than W rows, or more sums than its
// lane holds. Below 1 if W is too small for one token of every rank.
int32_t PartTokens(const BlockSizes& sizes);
// The most chunks of a call; 0 if W holds the rows of every plan, and a lane all sums.
int32_t NumParts(const BlockSizes& sizes);

// Flags on the device that say which launches are wanted.
struct Decision {
  int32_t whole;        // all ranks' rows fit: one pass over all tokens
  int32_t parts;        // they do not fit: one pass over each chunk
  int32_t kept;         // `whole`, and this rank's rows fit the result that saves the first product
  int32_t again;        // `whole`, but they do not fit, or forward did not fill it
  uint32_t tickets[2];  // tickets of the gradient product that is running
};

// Whether weight gradients multiply transposed copies of rows that are not quantized: the tensor
// cores take f32 operands, as tf32, only with the contracted dim along memory.
bool TurnsRows(const BlockSizes& sizes);

// Rows of some width as 8-bit operands.
struct QuantizedRows {
  uint8_t* data;  // [W, width]
  float* scale;   // kTensor: [L]; kBlock: [W, ceil(width / 128)]
};

// An operand of a weight gradient: transposed.
struct Copy {
  uint8_t* data;  // [width, padded W] values
  float* scale;   // kBlock: [padded W / 128, ceil(width / 128)]; else null: the rows' scales serve,
                  // or none
};
struct Copies {
  Copy lhs;
  Copy grads;
};

struct Workspace {
  Decision* decision;
  // The plan of the chunk that is running.
  int32_t* topk_idx;  // [P, K], -1 if the whole plan dropped the slot
  MutablePlan plan;
  float* weights;    // [W] of rows
  float* d_weights;  // [W], backward
  void* tokens;      // [W, H] dispatched; forward: later the experts' outputs
  void* grads;       // [W, H] backward: of the outputs, later of dispatched tokens
  void* hidden;      // [W, N] the first product; backward: later its gradient. May be null
  void* inner;       // [W, M] activations
  void* d_inner;     // [W, M] backward
  void* weights_32;  // [L, N, H] with f32 rows: a transposed copy of the first or the second weight

  // With 8-bit products. `inner` is null then, and `grads` lie where `tokens` were.
  float* amax;    // [L]
  uint8_t* sent;  // [T, QuantizedRowBytes] tokens, later dy; null: sent wide, or given packed
  QuantizedRows q_tokens;  // width H
  QuantizedRows q_grads;   // width H, backward
  QuantizedRows q_inner;   // width M; forward: where q_tokens were
  QuantizedRows q_hidden;  // width N, backward: where q_grads and q_inner were
  // Backward, over rows that are not there yet or any more. Where `tokens` are: the first weight
  // [L, N, H], and the operands of the second weight's gradient. Where `hidden` and `d_inner` were:
  // the operands of the first weight's gradient.
  uint8_t* wi;
  // Also with f32 rows. The copy of `inner` lies where `d_inner` was, that of `tokens` where the
  // copy of `grads` was, and that of `hidden` where `inner` and its copy were.
  Copies of_second;
  Copies of_first;
};

// Values in a line of a transposed copy of W rows.
int64_t TransposedRowsOf(const BlockSizes& sizes);

// Lays the regions out from `base` on and returns their bytes. `base` may be null.
// ep_runtime/workspace.py computes the same.
int64_t LayOut(const BlockSizes& sizes, bool backward, uint8_t* base, Workspace* out);

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_WORKSPACE_H_
