// Finds the places of a launch's staged rows in lanes: apart or packed, all at once or in parts
// (LaneRoom).
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_PLACES_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_PLACES_CUH_

#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/warp_scan.cuh"

namespace ep_runtime {
namespace cuda {

// Columns of the plan's recv_count.
__device__ __forceinline__ int CountColumns(bool packed, int ranks) {
  return packed ? 4 + 2 * ranks : 4;  // PackedColumns
}

// The host's choice of places, the same on every rank.
struct Staging {
  LaneRoom room;
  bool packed;
  int32_t part = 0;        // part that this launch moves
  int32_t most_parts = 1;  // number of launches in total

  __device__ int columns() const { return CountColumns(packed, room.ranks); }
};

// Staged rows of every pair of ranks, read from a packed plan. A plan is an ordinary array, so
// counts are clamped to possible values.
struct PairCounts {
  const int32_t* recv_count;
  int32_t ranks;
  int32_t tokens;

  __device__ int32_t All(int source, int dest) const { return At(source, 4 + dest); }
  __device__ int32_t FirstHalf(int source, int dest) const {
    return min(At(source, 4 + ranks + dest), All(source, dest));
  }

 private:
  __device__ int32_t At(int source, int column) const {
    return min(max(__ldg(&recv_count[source * CountColumns(true, ranks) + column]), 0), tokens);
  }
};

// The share of a pair's staged rows that one of several parts moves.
struct PartShare {
  int32_t part;
  int32_t parts;

  __device__ int32_t Begin(int32_t count) const {
    return static_cast<int32_t>(int64_t{count} * part / parts);
  }
  __device__ int32_t Length(int32_t count) const {
    return static_cast<int32_t>(int64_t{count} * (part + 1) / parts) - Begin(count);
  }
};

// Returns in how many parts dispatch sends: the fewest with which the rows that any rank receives
// fit its lane. A whole warp calls this; the result is the same on all ranks.
__device__ inline int32_t CountParts(const PairCounts& counts, const Staging& staging) {
  const int lane = threadIdx.x % 32;
  int32_t rows = 0;
  for (int source = 0; lane < counts.ranks && source < counts.ranks; ++source) {
    if (source != lane) rows += counts.All(source, lane);
  }
  const int32_t most = __reduce_max_sync(~0u, rows);
  const int32_t each = staging.room.rows - (counts.ranks - 1);
  return min(max((most + each - 1) / each, 1), staging.most_parts);
}

// Returns the `pointer` that lane `rank` of the warp has. A whole warp calls this; `rank` may
// differ by lane.
__device__ __forceinline__ uint8_t* PointerOf(int rank, uint8_t* pointer) {
  const auto value = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<uint8_t*>(__shfl_sync(~0u, value, rank));
}

// Staged rows that travel between this rank and another in a launch. Lane r of a warp has the rows
// of the pair with rank r.
struct StagedPlaces {
  int32_t begin;  // number of the first row
  int32_t count;
  uint8_t* first;  // address of the first row; the other rows follow

  // Returns the address of row `staged` of the pair with rank `rank`, which must exist. A whole
  // warp calls this.
  __device__ uint8_t* At(int rank, int32_t staged, int32_t row_bytes) const {
    const int32_t before = __shfl_sync(~0u, begin, rank);
    return PointerOf(rank, first) + int64_t{staged - before} * row_bytes;
  }
};

// Returns where rows of `source` begin in the lane of `dest`, if each source has room for `tokens`
// rows. The lane has no room for rows of `dest` itself.
__device__ inline uint8_t* RoomApart(const DeviceCall& call, int dest, int source, int32_t tokens,
                                     int32_t row_bytes) {
  return call.Lane(dest) + (source - (source > dest ? 1 : 0)) * int64_t{tokens} * row_bytes;
}

// Returns `count` rows that follow `before` other rows in the lane of `rank`, as far as they fit.
// All rows of a plan that prepare computed fit.
__device__ inline StagedPlaces PackedPlaces(const DeviceCall& call, const Staging& staging,
                                            int rank, int32_t begin, int32_t before, int32_t count,
                                            int32_t row_bytes) {
  const auto fitting = static_cast<int32_t>(staging.room.bytes / row_bytes);
  return {begin, max(min(count, fitting - before), 0),
          call.Lane(rank) + int64_t{before} * row_bytes};
}

// Returns in lane r the rows that this rank sends to rank r.
__device__ inline StagedPlaces SentPlaces(const DeviceCall& call, const Staging& staging,
                                          const PairCounts& counts, const PartShare& share,
                                          int32_t row_bytes) {
  const int dest = threadIdx.x % 32;
  if (dest >= call.ranks || dest == call.me) return {0, 0, nullptr};
  if (!staging.packed) {
    return {0, counts.tokens, RoomApart(call, dest, call.me, counts.tokens, row_bytes)};
  }
  int32_t before = 0;
  for (int source = 0; source < call.me; ++source) {
    if (source != dest) before += share.Length(counts.All(source, dest));
  }
  const int32_t count = counts.All(call.me, dest);
  return PackedPlaces(call, staging, dest, share.Begin(count), before, share.Length(count),
                      row_bytes);
}

// Returns in lane r the rows that rank r sends to this rank; `staged` is their number in all parts
// together.
__device__ inline StagedPlaces ReceivedPlaces(const DeviceCall& call, const Staging& staging,
                                              int32_t tokens, const PartShare& share,
                                              int32_t staged, int32_t row_bytes) {
  const int source = threadIdx.x % 32;
  const bool peer = source < call.ranks && source != call.me;
  const int32_t length = peer ? share.Length(staged) : 0;
  const int32_t before = WarpScan(length) - length;
  if (!peer) return {0, 0, nullptr};
  if (!staging.packed) {
    return {0, staged, RoomApart(call, call.me, source, tokens, row_bytes)};
  }
  return PackedPlaces(call, staging, call.me, share.Begin(staged), before, length, row_bytes);
}

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_STAGED_PLACES_CUH_
