// Staged rows of a plan: how many each source sends, and each row's entries.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/staged_places.cuh"
#include "cuda/movement/call/warp_scan.cuh"

namespace ep_runtime {
namespace cuda {

// Counts of each source's staged rows, source j's in lane j. The staged rows of all sources share
// one numbering.
struct SourceCounts {
  int32_t staged;
  int32_t first;  // staged rows of earlier sources

  __device__ SourceCounts(const DeviceCall& call, const Plan& plan, int tokens, int columns) {
    const int lane = threadIdx.x % 32;
    staged = lane < call.ranks ? plan.recv_count[lane * columns] : 0;
    staged = min(max(staged, 0), tokens);
    first = WarpScan(staged) - staged;
  }
};

// Staged rows that arrive in a launch of dispatch.
struct Arriving {
  SourceCounts counts;
  StagedPlaces places;
  int32_t most;  // rows of the peer that sends most

  __device__ Arriving(const DeviceCall& call, const Plan& plan, const Staging& staging,
                      const PartShare& share, int tokens, int32_t row_bytes)
      : counts(call, plan, tokens, staging.columns()),
        places(ReceivedPlaces(call, staging, tokens, share, counts.staged, row_bytes)),
        most(__reduce_max_sync(~0u, places.count)) {}
};

// A staged row of a peer and its entries. Lane i holds the i-th entry.
struct StagedRow {
  int32_t source;
  int32_t staged;  // -1: there is none
  int32_t begin;
  int32_t end;
  int count;
  int32_t row;  // -1: no entry
  int32_t slot;

  // Finds staged row number `item` of all peers' rows, and reads the bounds of its entries. Numbers
  // take sources in turn, which is about the order of arrival. `staged` is -1 if the source has
  // fewer rows.
  __device__ void Find(const DeviceCall& call, const Plan& plan, const Arriving& arriving,
                       int item) {
    const int peers = call.ranks - 1;
    const int number = item / peers;
    source = call.me + 1 + item % peers;
    if (source >= call.ranks) source -= call.ranks;
    const int32_t begin = __shfl_sync(~0u, arriving.places.begin, source);
    staged = number < __shfl_sync(~0u, arriving.places.count, source) ? begin + number : -1;
    const int64_t at = __shfl_sync(~0u, arriving.counts.first, source) + int64_t{staged};
    if (staged >= 0) ReadBounds(plan, at);
  }
  // Reads the bounds of the row's entries. `at` is the row's number among the staged rows of all
  // sources.
  __device__ void ReadBounds(const Plan& plan, int64_t at) {
    begin = plan.staged_start[at];
    end = plan.staged_start[at + 1];
  }
  __device__ void ReadEntries(const Plan& plan, const CallSizes& sizes) {
    const int lane = threadIdx.x % 32;
    const bool good = begin >= 0 && end <= sizes.capacity && end >= begin;
    count = good ? min(end - begin, sizes.top_k) : 0;
    row = lane < count ? plan.staged_row[begin + lane] : -1;
    slot = lane < count ? plan.staged_slot[begin + lane] : 0;
  }
  // A plan is an ordinary array, so check its numbers before writing to rows that they name.
  __device__ void CheckEntries(const CallSizes& sizes) {
    if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(sizes.capacity) ||
        static_cast<uint32_t>(slot) >= static_cast<uint32_t>(sizes.top_k)) {
      row = -1;
    }
  }
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_ROWS_CUH_
