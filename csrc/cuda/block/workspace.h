// The memory that a block call works in: W rows between its exchanges with any routing, and the
// plan of a chunk (`part` in code) if more rows arrive. XLA owns the memory, and nothing in it is
// needed after the call.
//
// Letters: T tokens, K slots of a token, H hidden, M inner, N columns of the first product (2 * M
// if it is gated), L experts of this rank, R ranks, C the plan's rows, W rows of the workspace.
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
  int32_t experts;   // L, with copies of other ranks' experts
  int32_t hidden;    // H
  int32_t inner;     // M
  int32_t columns;   // N
  int32_t ranks;     // R
  int32_t alignment;
  int32_t rows;       // W
  int32_t kept_rows;  // rows of the result `kept`, which saves the first product; 0: none
  int32_t element_bytes;
  GemmScaling scaling = GemmScaling::kNone;  // not kNone: products take 8-bit operands
  int32_t lane_rows = INT32_MAX;  // rows of a lane, which receives the sums of a rank's tokens
  int32_t spare = 0;    // S: the last S of the L experts are copies, and their weights are in slots
  bool packed = false;  // true: rows to send are given quantized; only with SendsQuantized
};

// Whether exchanges carry rows as 8-bit operands, followed by their block scales. True if each
// token is quantized alone and the bytes of its scales are a multiple of a copy's.
bool SendsQuantized(const BlockSizes& sizes);
// Returns the bytes of such a row.
int64_t QuantizedRowBytes(const BlockSizes& sizes);

// Whether the first product's kernel also computes the activation: of gated rows, with 16-bit
// operands, or with block scales if no block has columns of both the gate and up.
bool ProductActivates(const BlockSizes& sizes);

// Returns the tokens of a chunk: so few that no routing brings any rank more than W rows, or more
// sums than its lane holds. The result is below 1 if W is too small for one token of every rank.
int32_t ChunkTokens(const BlockSizes& sizes);
// Returns the largest number of chunks of a call; 0 if every plan's rows fit W and all sums fit a
// lane.
int32_t NumChunks(const BlockSizes& sizes);

// Flags on the device that decide which launches are wanted.
struct Decision {
  int32_t whole;        // 1: all ranks' rows fit, so one pass over all tokens
  int32_t chunks;       // 1: rows do not fit, so one pass over each chunk
  int32_t kept;         // `whole`, and this rank's rows fit `kept`, which saves the first product
  int32_t again;        // `whole`, but rows do not fit `kept` or forward did not fill it
  uint32_t tickets[2];  // tickets of the gradient product that is running
};

// Whether weight gradients multiply transposed copies of rows that are not quantized: the tensor
// cores take f32 operands, as tf32, only if the contracted dim is contiguous.
bool TransposesRows(const BlockSizes& sizes);

// Rows, each `width` values, as 8-bit operands.
struct QuantizedRows {
  uint8_t* data;  // [W, width]
  float* scale;   // kTensor: [L]; kBlock: [W, ceil(width / 128)]
};

// A transposed operand of a weight gradient.
struct Copy {
  uint8_t* data;  // [width, padded W] values
  float* scale;   // kBlock: [padded W / 128, ceil(width / 128)]; null otherwise: products use the
                  // rows' scales, or none
};
struct Copies {
  Copy lhs;
  Copy grads;
};

struct Workspace {
  Decision* decision;
  // Slots for copied weights, later for their gradients: of the first and the second weight. S + 1
  // weights have room, so that slots can begin a whole number of weights from the other experts'
  // array. The gate's slots come before up's, if they are two arrays.
  uint8_t* wi_slots;
  uint8_t* wo_slots;
  // The plan of the chunk that is running.
  int32_t* topk_idx;  // [P, K], -1 if the whole plan dropped the slot
  MutablePlan plan;
  float* weights;    // [W] weights of rows
  float* d_weights;  // [W], backward
  void* tokens;      // [W, H] dispatched tokens; forward: later the experts' outputs
  void* grads;       // [W, H] backward: gradients of the outputs, later of dispatched tokens
  void* hidden;      // [W, N] the first product; backward: later its gradient. Null if nobody
                     // reads it
  void* inner;       // [W, M] activations
  void* d_inner;     // [W, M] backward
  void* weights_32;  // [L, N, H] with f32 rows: a transposed copy of the first or the second weight

  // For 8-bit products. `inner` is null then, and `grads` overwrite `tokens`.
  float* amax;    // [L]
  uint8_t* sent;  // [T, QuantizedRowBytes] tokens, later dy; null: rows are sent wide, or given
                  // packed
  QuantizedRows q_tokens;  // width H
  QuantizedRows q_grads;   // width H, backward
  QuantizedRows q_inner;   // width M; forward: overwrites q_tokens, unless ProductActivates
  QuantizedRows q_hidden;  // width N, backward: overwrites q_grads and q_inner
  // For backward, in memory of rows before they are written or after their last use. In the memory
  // of `tokens`: the first weight [L, N, H], and the operands of the second weight's gradient. In
  // the memory of `hidden` and `d_inner`: the operands of the first weight's gradient.
  uint8_t* wi;
  // Also for f32 rows. The copy of `inner` overwrites `d_inner`, the copy of `tokens` overwrites
  // the copy of `grads`, and the copy of `hidden` overwrites `inner` and its copy.
  Copies of_second;
  Copies of_first;
};

// Returns the number of values in a line of a transposed copy of W rows.
int64_t TransposedRowsOf(const BlockSizes& sizes);

// Lays the regions out from `base` on and returns their bytes. `base` may be null.
// ep_runtime/workspace.py computes the same.
int64_t LayOut(const BlockSizes& sizes, bool backward, uint8_t* base, Workspace* out);

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_WORKSPACE_H_
