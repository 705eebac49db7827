// What one warp sums, the ring that it loads the parts through, and its sums.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_
#define EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_

#include "cuda/bulk_copy.cuh"
#include "cuda/movement/call/row_math.cuh"

namespace ep_runtime {
namespace cuda {
namespace combine {

constexpr int kVectors = 4;                      // of a row that a lane sums at a time
constexpr int kPieceBytes = 32 * 16 * kVectors;  // of a row that a warp sums at a time
constexpr int kRingBytes = 12 * 1024;            // of a warp
constexpr int kMaxSlots = kRingBytes / kPieceBytes;

// What one warp sums: rows of this rank, in slot order, and partial sums of other ranks, in rank
// order around them. Lane i holds the i-th part.
struct Item {
  const uint8_t* part;
  float weight;
  uint32_t own;  // bit i: the part is a row of this rank
  int count;
  uint8_t* out;
  int32_t rank;    // of the peer that gets the sum; lane k: rank of the token's slot k
  int32_t staged;  // there; lane r: staged row on rank r
  int32_t slot;    // lane i: slot of the i-th part's row
  int32_t row;     // lane i: row of the i-th part
  int32_t token;
};

// A warp's place in the list of its loads: parts of piece 0, parts of piece 1, ...
struct Cursor {
  int piece;
  int part;
  __device__ bool Done(const Item& item, int pieces) const {
    return item.count == 0 || piece >= pieces;
  }
  __device__ void Advance(const Item& item) {
    if (++part < item.count) return;
    part = 0;
    ++piece;
  }
};

template <RowType kType>
using Sums = float[kVectors][Element<kType>::kPerVector];

template <RowType kType>
__device__ __forceinline__ void Clear(Sums<kType>& sums) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int j = 0; j < Element<kType>::kPerVector; ++j) sums[u][j] = 0.0f;
  }
}

// The loads of one warp, several parts ahead of their use. The lane that holds a part loads it.
template <RowType kType, bool kExact>
struct PartRing {
  static constexpr int kWide = kExact ? 4 * Element<kType>::kPerVector / 16 : 1;
  static constexpr int kSlotBytes = kPieceBytes * kWide;
  static constexpr int kSlots = kRingBytes / kSlotBytes;

  uint8_t* data;
  LoadBarrier* barriers;
  int row_bytes;
  bool wide_out;  // the sums that stay here are stored in f32; with kExact alone
  int issued;
  int used;

  __device__ bool Full() const { return issued - used >= kSlots; }
  __device__ void Issue(const Item& item, const Cursor& at) {
    const int slot = issued++ % kSlots;
    if (static_cast<int>(threadIdx.x % 32) != at.part) return;
    const int wide = (item.own >> at.part & 1) != 0 ? 1 : kWide;
    const int64_t offset = int64_t{at.piece} * kPieceBytes;
    const int bytes = min(kPieceBytes, row_bytes - static_cast<int>(offset)) * wide;
    barriers[slot].Load(data + slot * kSlotBytes, item.part + offset * wide, bytes);
  }
  __device__ const uint8_t* Await() {
    const int slot = used % kSlots;
    barriers[slot].Wait(used / kSlots & 1);
    return data + slot * kSlotBytes;
  }
};

// One warp's share of what the block has; initialises its barriers.
template <RowType kType, bool kExact>
__device__ PartRing<kType, kExact> MakeRing(uint8_t* rings, LoadBarrier* barriers, int row_bytes,
                                            bool wide_out) {
  const int warp = threadIdx.x / 32;
  PartRing<kType, kExact> ring{
      rings + warp * kRingBytes, barriers + warp * kMaxSlots, row_bytes, wide_out, 0, 0};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < ring.kSlots; ++i) ring.barriers[i].Init();
    FenceBarrierInit();
  }
  __syncwarp();
  return ring;
}

// A lane's share of one part's piece.
template <RowType kType, bool kWide>
struct PartVectors {
  using E = Element<kWide ? RowType::kF32 : kType>;
  static constexpr int kWords = Element<kType>::kPerVector / E::kPerVector;
  uint4 words[kVectors][kWords];

  __device__ __forceinline__ void Read(const uint8_t* part, int vectors) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int index = u * 32 + static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[u][i] = index < vectors ? reinterpret_cast<const uint4*>(part)[index * kWords + i]
                                      : make_uint4(0, 0, 0, 0);
      }
    }
  }
  template <bool kWeighted>
  __device__ __forceinline__ void AddTo(float weight, Sums<kType>& sums) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float x[E::kPerVector];
        E::Unpack(words[u][i], x);
#pragma unroll
        for (int j = 0; j < E::kPerVector; ++j) {
          float& sum = sums[u][i * E::kPerVector + j];
          sum = __fadd_rn(sum, kWeighted ? __fmul_rn(weight, x[j]) : x[j]);
        }
      }
    }
  }
};

// sums += own, rounded as a partial sum that travels is rounded.
template <RowType kType, bool kExact>
__device__ __forceinline__ void AddOwn(Sums<kType>& own, Sums<kType>& sums) {
  using E = Element<kType>;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if constexpr (!kExact) E::Unpack(E::Pack(own[u]), own[u]);
#pragma unroll
    for (int j = 0; j < E::kPerVector; ++j) sums[u][j] = __fadd_rn(sums[u][j], own[u][j]);
  }
}

// Stores the sums of a piece: in f32 where `wide`, else in the row type.
template <RowType kType, bool kWide>
__device__ __forceinline__ void StoreSums(const Sums<kType>& sums, uint8_t* out, int vectors) {
  using E = Element<kType>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int index = u * 32 + lane;
    if (index >= vectors) continue;
    if constexpr (kWide && E::kPerVector == 8) {
      StoreVector(out + index * 32, Element<RowType::kF32>::Pack(&sums[u][0]));
      StoreVector(out + index * 32 + 16, Element<RowType::kF32>::Pack(&sums[u][4]));
    } else {
      StoreVector(out + index * 16, E::Pack(sums[u]));
    }
  }
}

}  // namespace combine
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_COMBINE_PART_SUMS_CUH_
