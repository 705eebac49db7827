// Order in which clusters of two blocks compute output tiles.
//
// A cluster takes two tiles at a time. They are one below the other and share their columns'
// operand; or, if only one row tile of a group is left, they are side by side and share their rows'
// operand. Every block computes the list on its own from the group sizes, and writes nothing.
// Next() returns the next pair of this cluster if one launch computes the whole product. At()
// returns the pair with a given number; numbers must grow from call to call.
#ifndef EP_RUNTIME_CUDA_GEMM_TILE_TILE_SCHEDULE_CUH_
#define EP_RUNTIME_CUDA_GEMM_TILE_TILE_SCHEDULE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm/product/groups.cuh"

namespace ep_runtime {
namespace cuda {
namespace gemm {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kTileDepth = 64;
constexpr int kMaxExperts = 1024;
constexpr int kClusterBlocks = 2;

struct Tile {
  int32_t expert;
  int32_t group;    // group whose rows the tile has; unused if output rows are features
  int32_t row;      // first row in the output
  int32_t column;   // may be past the last column: then nothing is stored
  int32_t row_end;  // end of the group's rows
  bool share_rows;  // true: the cluster's two blocks have the same rows; false: the same columns
};

struct Cluster {
  uint32_t rank;   // rank of this block in the cluster
  uint32_t index;  // index of the cluster among all clusters
  uint32_t count;
};

// The tiles of a matrix of `rows` rows, in pairs.
struct TilePairs {
  int32_t row_tiles;
  int32_t column_tiles;

  __device__ TilePairs(int32_t rows, int32_t column_tiles)
      : row_tiles((rows + kTileRows - 1) / kTileRows), column_tiles(column_tiles) {}
  __device__ uint32_t Count() const {
    return row_tiles / 2 * column_tiles + (row_tiles & 1) * ((column_tiles + 1) / 2);
  }
  // Tile coordinates of block `rank` in pair `index`. A band of row tiles spans all columns.
  __device__ void Locate(uint32_t index, uint32_t rank, int32_t band, int32_t* row_tile,
                         int32_t* column_tile, bool* share_rows) const {
    const uint32_t pairs = row_tiles / 2;
    *share_rows = index >= pairs * column_tiles;
    if (*share_rows) {
      *row_tile = row_tiles - 1;
      *column_tile = 2 * (index - pairs * column_tiles) + rank;
      return;
    }
    const uint32_t first = index / (band * column_tiles) * band;
    const uint32_t height = min(static_cast<uint32_t>(band), pairs - first);
    const uint32_t inside = index - first * column_tiles;
    *row_tile = 2 * (first + inside % height) + rank;
    *column_tile = inside / height;
  }
};

// Schedule if output rows are the groups' rows. All tiles cost the same, so clusters take them in
// turn.
class RowTileSchedule {
 public:
  // Tiles begin `column_step` columns apart.
  __device__ RowTileSchedule(const Groups& groups, int32_t column_tiles, int32_t column_step,
                             int32_t band, Cluster cluster)
      : groups_(groups),
        column_tiles_(column_tiles),
        column_step_(column_step),
        band_(band),
        cluster_(cluster),
        next_(cluster.index) {}

  __device__ bool Next(Tile* tile) {
    const uint32_t index = next_;
    next_ += cluster_.count;
    return At(index, tile);
  }

  __device__ bool At(uint32_t index, Tile* tile) {
    while (index >= end_) {
      if (++group_ == groups_.num_groups) return false;
      const int slab = group_ / groups_.groups_per_slab;
      if (slab != slab_) {
        slab_ = slab;
        rows_ = {slab * groups_.slab_rows, 0};
      }
      rows_.start += rows_.size;
      rows_.size = GroupSize(groups_, group_, (slab + 1) * groups_.slab_rows - rows_.start);
      begin_ = end_;
      end_ += TilePairs(rows_.size, column_tiles_).Count();
    }
    int32_t row_tile;
    int32_t column_tile;
    TilePairs(rows_.size, column_tiles_)
        .Locate(index - begin_, cluster_.rank, band_, &row_tile, &column_tile, &tile->share_rows);
    tile->expert = group_ % groups_.num_experts;
    tile->group = group_;
    tile->row = rows_.start + row_tile * kTileRows;
    tile->row_end = rows_.start + rows_.size;
    tile->column = column_tile * column_step_;
    return true;
  }

 private:
  const Groups groups_;
  const int32_t column_tiles_;
  const int32_t column_step_;
  const int32_t band_;
  const Cluster cluster_;
  int group_ = -1;
  int slab_ = -1;
  Rows rows_{0, 0};
  uint32_t begin_ = 0;  // pairs of tiles before this group
  uint32_t end_ = 0;
  uint32_t next_;
};

// Schedule if output rows are features. A tile's cost is its expert's number of rows. Experts are
// sorted by falling cost, and every other round runs through the clusters backwards, so that the
// clusters' total costs differ little.
class ExpertTileSchedule {
 public:
  __device__ ExpertTileSchedule(const uint16_t* order, int32_t num_experts, int32_t rows,
                                int32_t column_tiles, int32_t band, Cluster cluster)
      : order_(order),
        rows_(rows),
        pairs_(rows, column_tiles),
        band_(band),
        cluster_(cluster),
        end_(num_experts * pairs_.Count()) {}

  __device__ bool Next(Tile* tile) {
    const uint32_t place = round_ & 1 ? cluster_.count - 1 - cluster_.index : cluster_.index;
    // The last round may end before this cluster's turn.
    return At(round_++ * cluster_.count + place, tile);
  }

  __device__ bool At(uint32_t index, Tile* tile) {
    if (index >= end_) return false;
    const uint32_t each = pairs_.Count();
    int32_t row_tile;
    int32_t column_tile;
    pairs_.Locate(index % each, cluster_.rank, band_, &row_tile, &column_tile, &tile->share_rows);
    tile->expert = order_[index / each];
    tile->row = row_tile * kTileRows;
    tile->row_end = rows_;
    tile->column = column_tile * kTileColumns;
    return true;
  }

 private:
  const uint16_t* order_;
  const int32_t rows_;
  const TilePairs pairs_;
  const int32_t band_;
  const Cluster cluster_;
  const uint32_t end_;
  uint32_t round_ = 0;
};

// Writes experts to `order`, the ones with most rows first; `cost` is scratch memory, one element
// per expert. All threads of a block call this. Both arrays are complete after the block's next
// barrier.
__device__ inline void OrderExperts(const Groups& groups, uint32_t* cost, uint16_t* order) {
  for (int expert = threadIdx.x; expert < groups.num_experts; expert += blockDim.x) {
    uint32_t steps = 0;
    for (int group = expert; group < groups.num_groups; group += groups.num_experts) {
      steps += (GroupSize(groups, group, groups.slab_rows) + kTileDepth - 1) / kTileDepth;
    }
    cost[expert] = steps;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < groups.num_experts; expert += blockDim.x) {
    const uint32_t mine = cost[expert];
    int place = 0;
    for (int other = 0; other < groups.num_experts; ++other) {
      place += cost[other] > mine || (cost[other] == mine && other < expert);
    }
    order[place] = static_cast<uint16_t>(expert);
  }
}

}  // namespace gemm
}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_GEMM_TILE_TILE_SCHEDULE_CUH_
