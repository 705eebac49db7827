// The receiving half of combine's backward: computes gradients of rows once the gradient of their
// token has arrived.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_GRADS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_GRADS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/staged_rows.cuh"
#include "cuda/movement/dispatch/arrivals.cuh"
#include "cuda/movement/dispatch/dispatch_kernels.h"
#include "cuda/movement/dispatch/grad_row.cuh"

namespace ep_runtime {
namespace cuda {
namespace dispatch {

// Writes the gradients of one token's rows on this rank. `mine` has a bit for each lane that has
// such a row in `lane_row`.
template <RowType kType>
__device__ void WriteGrads(const CombineBwdParams& params, const void* grad, uint32_t mine,
                           int32_t lane_row, float* tree) {
  for (; mine != 0; mine &= mine - 1) {
    const int64_t row = __shfl_sync(~0u, lane_row, __ffs(mine) - 1);
    const int64_t offset = row * params.row_bytes;
    const bool scale = params.weights != nullptr;
    const GradRow<kType> one{
        static_cast<const uint4*>(grad),
        params.expert_out == nullptr ? nullptr
                                     : reinterpret_cast<const uint4*>(
                                           static_cast<const uint8_t*>(params.expert_out) + offset),
        reinterpret_cast<uint4*>(static_cast<uint8_t*>(params.d_expert_out) + offset),
        params.sizes.width,
        scale,
        scale ? params.weights[row] : 1.0f};
    const float dot = one.Write(tree);
    if (params.d_weights != nullptr && threadIdx.x % 32 == 0) params.d_weights[row] = dot;
  }
}

// Writes gradients of this rank's own tokens, then of tokens that arrive. Each warp takes the next
// token.
template <RowType kType>
__device__ void PlaceGrads(const DeviceCall& call, const CombineBwdParams& params,
                           const Staging& staging, const PartShare& share, float* tree) {
  const int lane = threadIdx.x % 32;
  const CallSizes& sizes = params.sizes;
  const Arriving arriving(call, params.plan, staging, share, sizes.tokens, params.row_bytes);
  const uint32_t own = share.part == 0 ? sizes.tokens : 0;
  const uint32_t total = own + (call.ranks > 1 ? arriving.most * (call.ranks - 1) : 0);
  for (uint32_t item = TakeTicket(call, kItemTicket); item < total;) {
    const uint32_t next = TakeTicket(call, kItemTicket);
    if (item < own) {
      int32_t row = -1;
      if (lane < sizes.top_k) {
        const int64_t slot = int64_t{item} * sizes.top_k + lane;
        if (params.plan.dst_rank[slot] == call.me) row = params.plan.dst_row[slot];
        if (row >= sizes.capacity) row = -1;
      }
      const auto* grad =
          static_cast<const uint8_t*>(params.grad) + int64_t{item} * params.row_bytes;
      WriteGrads<kType>(params, grad, __ballot_sync(~0u, row >= 0), row, tree);
    } else {
      StagedRow row{};
      row.Find(call, params.plan, arriving, static_cast<int>(item - own));
      row.ReadEntries(params.plan, sizes);
      row.CheckEntries(sizes);
      if (row.staged >= 0) {
        bool alive = true;
        if (lane == 0) {
          alive = AwaitWord(call, FlagOf(call, row), call.tag, row.source);
          FenceProxyAsync();
        }
        if (__shfl_sync(~0u, alive, 0) == 0) break;
        __syncwarp();
        const auto* grad = arriving.places.At(row.source, row.staged, params.row_bytes);
        WriteGrads<kType>(params, grad, __ballot_sync(~0u, row.row >= 0), row.row, tree);
      }
    }
    item = next;
  }
}

}  // namespace dispatch
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_DISPATCH_PLACE_GRADS_CUH_
