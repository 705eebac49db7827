// Computes the plan of a group over nodes from the expert indices of all its ranks. Every rank has
// all indices and computes the same plan, so nothing else is sent.
//
// Letters: N ranks of an EP group on D nodes of G; T tokens of a rank, K slots of each, L experts
// of a rank, C rows of a slab. Virtual tokens have fixed numbers: token t of the rail peer on node
// m is virtual token m * T + t (`ops/calls/plan.py`).
#ifndef EP_RUNTIME_CUDA_NCCL_NODE_PLAN_H_
#define EP_RUNTIME_CUDA_NCCL_NODE_PLAN_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace ep_runtime {
namespace nccl {

struct NodePlanParams {
  int32_t ranks;      // N
  int32_t node_size;  // G, which divides N
  int32_t me;
  int32_t tokens;         // T, at least 1
  int32_t top_k;          // K, at most 32
  int32_t experts;        // L
  int32_t capacity;       // C
  int32_t alignment;      // rows; zones are rounded up to multiples of this for comparison with C
  int32_t row_alignment;  // rows; zones in the slab are rounded up to multiples of this; divides
                          // `alignment`
  const int32_t* idx;     // [N, T, K], device; a slot is unused if its number is not an expert
  // The arrays below are on the device and fully written.
  int32_t* dst_rank;      // [T, K]
  int32_t* dst_row;       // [T, K]
  int32_t* recv_count;    // [G, 4]
  int32_t* staged_start;  // [N * T + 1]
  int32_t* staged_row;    // [C]
  int32_t* staged_slot;   // [C]
  int32_t* kept;          // [L]
  int32_t* group_sizes;   // [L]
  int32_t* num_recv;      // [1]
  int32_t* virtual_rank;  // [D * T, K]
  int32_t* virtual_row;   // [D * T, K]
  int32_t* chunks;        // [1], always 1
  int32_t* scratch;       // [NodePlanScratch()] words
};

// Returns the words of scratch, from static sizes.
int64_t NodePlanScratch(int64_t ranks, int64_t tokens, int64_t top_k, int64_t experts);
// Makes five launches.
cudaError_t LaunchNodePlan(cudaStream_t stream, const NodePlanParams& params);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_NODE_PLAN_H_
