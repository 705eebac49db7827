// Launches between a block call's exchanges that are the same for operands of every type.
#ifndef EP_RUNTIME_CUDA_BLOCK_EXPERT_LAUNCHES_H_
#define EP_RUNTIME_CUDA_BLOCK_EXPERT_LAUNCHES_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block/block_call.h"
#include "cuda/block/workspace.h"
#include "cuda/gemm/product/groups.h"
#include "cuda/gemm/product/product.h"

#define EP_RETURN_IF_CUDA_ERROR(launch)                   \
  do {                                                    \
    const cudaError_t launch_error = (launch);            \
    if (launch_error != cudaSuccess) return launch_error; \
  } while (false)

namespace ep_runtime {
namespace cuda {
namespace block {

// A place for a pass's first product, and the flag that is set if the product is written there.
struct Hidden {
  const int32_t* wanted;
  void* rows;     // null: not stored
  int32_t count;  // rows that `rows` has room for
};

// Rows of a pass after its exchanges.
struct PassRows {
  const int32_t* wanted;
  const int32_t* group_sizes;  // [L]
  bool adds;                   // true: gradients of weights are added to earlier passes' sums
  Hidden places[2];            // places for the first product; the device chooses one
  int count;                   // number of places
};

// A weight or its gradient, in one array or in a pair's two.
struct WeightArrays {
  int count;
  int64_t bytes;   // of one expert in one array
  RowType type;    // of gradients
  void* home[2];   // of this rank's own experts
  void* slots[2];  // of copies
};

class ExpertLaunches {
 protected:
  ExpertLaunches(cudaStream_t stream, const BlockParams& params, const Workspace& at)
      : stream_(stream), p_(params), s_(params.sizes), at_(at) {}

  rows::RowGroups GroupsOf(const PassRows& rows, int32_t count) const {
    return {rows.group_sizes, 1, s_.experts, count};
  }
  // Returns a product by the first or the second weight, without operands.
  GroupedGemmParams ProductOf(GemmProduct product, const PassRows& rows, void* out,
                              bool first) const;
  // Returns the launch of `gemm`, a first product, that writes to one of its possible places, and
  // also the activation to `inner` if ProductActivates.
  GroupedGemmParams InPlace(GroupedGemmParams gemm, const Hidden& hidden, bool weighted) const;
  WeightArrays WeightsOf(bool first) const;
  WeightArrays GradsOf(bool first) const;
  // Sends weights of copied experts to their slots, or their gradients from slots to the experts'
  // own ones. With `beside`, on the SMs of an exchange that overlaps a product.
  cudaError_t CopyWeights(cudaStream_t stream, bool first, bool beside = false) const;
  cudaError_t CopyGrads(cudaStream_t stream, bool first, bool beside = false) const;
  // Whether the workspace has room for transposed copies of rows.
  bool CopiesFit() const;
  gemm::Groups CopiedGroups(const PassRows& rows) const;
  static cudaError_t Multiply(cudaStream_t stream, GroupedGemmParams gemm);
  cudaError_t Multiply(const GroupedGemmParams& gemm) const { return Multiply(stream_, gemm); }

  // Returns an activation or its gradient, without results and weights.
  template <typename Params>
  Params ActivationOf(const PassRows& rows, const Hidden& hidden) const {
    Params activation{};
    activation.function = p_.function;
    activation.type = p_.type;
    activation.gated = p_.gated;
    activation.groups = GroupsOf(rows, hidden.count);
    activation.width = s_.inner;
    activation.hidden = hidden.rows;
    activation.wanted = hidden.wanted;
    return activation;
  }
  cudaError_t ActivateBwd(const PassRows& rows, const Hidden& hidden) const;
  bool WantsWeightGrads() const { return p_.dwo != nullptr; }
  // Sums the gradients of both biases, if there are any.
  cudaError_t SumBiases(const PassRows& rows) const;

  cudaStream_t stream_;
  const BlockParams& p_;
  const BlockSizes& s_;
  const Workspace& at_;

 private:
  WeightArrays ArraysOf(bool first, const void* one, const void* up, int64_t value_bytes) const;
  cudaError_t CopyExperts(cudaStream_t stream, const WeightArrays& arrays, bool home,
                          bool beside) const;
};

}  // namespace block
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_BLOCK_EXPERT_LAUNCHES_H_
