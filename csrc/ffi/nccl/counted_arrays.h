// Arrays of which only counted rows cross between nodes.
#ifndef EP_RUNTIME_FFI_NCCL_COUNTED_ARRAYS_H_
#define EP_RUNTIME_FFI_NCCL_COUNTED_ARRAYS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/nccl/exchange.h"
#include "cuda/nccl/group.h"
#include "ffi/call_frame.h"

namespace ep_runtime {

// Copies words from `device` to the host, for the target `call`. The wait is bounded by
// op_timeout_ns.
Status ReadCounts(const nccl::NcclGroup& group, std::string_view call, cudaStream_t stream,
                  const int32_t* device, std::vector<int32_t>* counts);

// One side of a counted exchange. Its rows are blocks [P, R, X], or `lined_up` [N, X], with each
// peer's rows after the rows of lower peers.
struct CountedSide {
  int64_t rows;  // rows of a block, or of all peers if lined_up
  bool lined_up;
  std::vector<int32_t> counts;  // [P]
  std::vector<int64_t> first;   // [P]

  Status Read(const Operand& array, int64_t peers);
  Dims DimsOf(int64_t width) const;
  // Limits counts to the rows that exist, because counts of a lost rank may be too large.
  void Take(const int32_t* given);
};

// Arrays that cross with the same counts. Operands are blocks [P, R, X], whose first rows are sent,
// or rows [N, X] of one peer after another; results likewise. A rank's own rows are copied. Other
// rows of the results are undefined.
class CountedArrays {
 public:
  explicit CountedArrays(const nccl::Peers& peers) : peers_(peers) {}
  CountedArrays(const CountedArrays&) = delete;
  CountedArrays& operator=(const CountedArrays&) = delete;

  Status Add(const Operand& rows, const Operand& result);
  // Takes counts [2, P]: of the rows sent to each peer, and received from it.
  void Take(const int32_t* counts);
  Status CopyOwn(cudaStream_t stream) const;
  // Sends and receives, inside the caller's NCCL group. Returns the first error, or success.
  int Send(const nccl::Api& api, nccl::Comm* comm, cudaStream_t stream) const;

 private:
  nccl::Peers peers_;
  CountedSide sent_, received_;
  std::vector<nccl::CountedRows> arrays_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_COUNTED_ARRAYS_H_
