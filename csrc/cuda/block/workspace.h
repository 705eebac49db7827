// The memory that a block call works in: rows between its exchanges, W of them whatever the
// routing, and the plan of a part where more rows arrive. XLA owns it, and nothing in it outlives
// the call.
//
// Letters: T tokens, K slots of one, H hidden, M inner, N columns of the first product (2 * M where
// it is gated), L experts of this rank, R ranks, C the plan's rows, W rows of the workspace.
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
  int32_t kept_rows;  // of the result that keeps the first product; 0: none
  int32_t element_bytes;
  GemmScaling scaling = GemmScaling::kNone;  // else products are of 8-bit operands
};

// Whether exchanges carry rows as 8-bit products take them, with the scales of their blocks behind
// them: where each token is quantized by itself, and its scales fill whole copies.
bool SendsQuantized(const BlockSizes& sizes);
// Bytes of such a row.
int64_t QuantizedRowBytes(const BlockSizes& sizes);

// Tokens of a part, few enough that no routing of them brings any rank more than W rows. Below 1
// where W is too small for one token of every rank.
int32_t PartTokens(const BlockSizes& sizes);
// 0 where W holds the rows of every plan.
int32_t NumParts(const BlockSizes& sizes);

// What decides on the device which launches are wanted.
struct Decision {
  int32_t whole;        // all ranks' rows fit: one pass over all tokens
  int32_t parts;        // they do not
  int32_t kept;         // `whole`, and this rank's rows fit what keeps the first product
  int32_t again;        // `whole`, and they do not, or nobody made them
  uint32_t tickets[2];  // of the gradient's product that runs
};

// Whether weight gradients are products of transposed copies of rows that are not quantized: the
// tensor cores take f32 operands, as tf32, with what is contracted along memory alone.
bool TurnsRows(const BlockSizes& sizes);

// Rows as 8-bit products take them, of some width.
struct QuantizedRows {
  uint8_t* data;  // [W, width]
  float* scale;   // kTensor: [L]; kBlock: [W, ceil(width / 128)]
};

// An operand of a weight gradient as its product takes it: transposed.
struct Copy {
  uint8_t* data;  // [width, padded W] values
  float* scale;   // kBlock: [padded W / 128, ceil(width / 128)]; else null, rows' serve or none
};
struct Copies {
  Copy lhs;
  Copy grads;
};

struct Workspace {
  Decision* decision;
  // Of the part that is under way.
  int32_t* topk_idx;  // [P, K], -1 where the whole plan dropped the slot
  MutablePlan plan;
  float* weights;    // [W] of rows
  float* d_weights;  // [W], backward
  void* tokens;      // [W, H] dispatched; forward: then the experts' outputs
  void* grads;       // [W, H] backward: of the outputs, then of dispatched tokens
  void* hidden;      // [W, N] the first product; backward: then its gradient. May be null
  void* inner;       // [W, M] activations
  void* d_inner;     // [W, M] backward
  void* weights_32;  // [L, N, H] of f32 rows: a weight transposed, the first one or the second

  // With 8-bit products. `inner` is null then, and `grads` are where `tokens` were.
  float* amax;             // [L]
  uint8_t* sent;           // [T, QuantizedRowBytes] of tokens, then of dy; null: rows are sent wide
  QuantizedRows q_tokens;  // H
  QuantizedRows q_grads;   // H, backward
  QuantizedRows q_inner;   // M; forward: where q_tokens were
  QuantizedRows q_hidden;  // N, backward: where q_grads and q_inner were
  // Backward, in the place of rows that are not there yet, or not any more: [L, N, H] the first
  // weight and what the second weight's gradient is made of, where `tokens` are; what the first
  // weight's is made of, where `hidden` and `d_inner` were.
  uint8_t* wi;
  // Of f32 rows too. The copy of `inner` lies where `d_inner` was; that of `tokens` where that of
  // `grads` was, and that of `hidden` where `inner` and its copy were.
  Copies of_second;
  Copies of_first;
};

// Values of a line of a transposed copy of W rows, as products take it.
int64_t TransposedRowsOf(const BlockSizes& sizes);

// Lays the regions out from `base` on, and says how many bytes they take; `base` may be null.
// ep_runtime/workspace.py has the same sums.
int64_t LayOut(const BlockSizes& sizes, bool backward, uint8_t* base, Workspace* out);

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_WORKSPACE_H_
