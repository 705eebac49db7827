// A kernel's view of its group: the descriptor in device memory, the windows' layout, and the
// record that a failing wait leaves for the host.
#ifndef EP_RUNTIME_CUDA_DEVICE_DEVICE_GROUP_H_
#define EP_RUNTIME_CUDA_DEVICE_DEVICE_GROUP_H_

#include <cstdint>

#include "core/memory/layout.h"
#include "core/memory/plan_arrays.h"

namespace ep_runtime {
namespace cuda {

constexpr int kMaxRanks = 32;  // ranks of one EP group, because a token's ranks are bits of one
                               // word
constexpr int kMaxTopK = 32;   // slots of a token, because a warp has one slot per lane
constexpr int kMaxPrepareBlocks = 64;
// Limits of the counts that a block of prepare has in shared memory.
constexpr int kMaxExperts = 2048;
constexpr int64_t kMaxBlockSlots = 65535;  // slots (T * K), counted in 16 bits
constexpr int kMaxBlocks = 256;
constexpr int kFlagLine = 128;
constexpr int kBarriers = 4;
constexpr int kVerdictSlots = 2;

// Element type of rows. Rows of kBytes are only copied, never added.
enum class RowType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kBytes = 3 };

enum class FailReason : uint32_t {
  kNone = 0,
  kTimeout = 1,   // the peer was silent for longer than the budget
  kPoisoned = 2,  // the board marks this generation as over
  kMismatch = 3,  // the peer runs another call in the same epoch
  kClosed = 4,    // the group was closed before the kernel ran
};

// Record of a failure, in host memory. The first wait that fails in a generation writes it, `valid`
// last.
struct FailRecord {
  uint32_t valid;
  uint32_t reason;  // FailReason
  uint32_t op;      // OpCode
  uint32_t handle;
  uint64_t layer_id;
  uint64_t generation;
  uint64_t epoch;
  int32_t waiting_for;  // EP rank
  uint32_t seen;        // flag word
  uint32_t expected;
  uint32_t peer_op;  // with kMismatch: the op that the peer runs
  uint32_t peer_handle;
  uint32_t reserved;
  uint64_t peer_layer_id;
  uint64_t waited_ns;
};

// Record, in host memory, of the first index that is not an expert's; `valid` is stored last.
struct BadIndex {
  uint32_t valid;
  int32_t token;  // token of the rank
  int32_t slot;
  int32_t value;
  uint64_t layer_id;
};

// Result that callers read after prepare with on_overflow="error". It is the same on every rank of
// the group.
struct DeviceVerdict {
  int32_t rank;  // lowest world rank whose demand is above its capacity, or -1
  int32_t demand;
  int32_t capacity;
};

// One 128-byte line per (lane, source): the call that the source runs in this lane.
struct CallLine {
  uint64_t epoch;
  uint64_t generation;
  uint64_t layer_id;
  uint32_t op;
  uint32_t handle;
  uint8_t reserved[kFlagLine - 32];
};
static_assert(sizeof(CallLine) == kFlagLine);

// One line per (verdict slot, world rank), in groups with on_overflow="error".
struct VerdictLine {
  uint64_t sequence;  // stored last
  int32_t rank;       // lowest world rank of the domain that overflowed, or -1
  int32_t demand;
  int32_t capacity;
  uint8_t reserved[kFlagLine - 20];
};
static_assert(sizeof(VerdictLine) == kFlagLine);

// Offsets of a window's flags. The flags of each lane follow all lanes; each source writes only its
// own part of each region.
struct FlagLayout {
  int64_t calls_offset;    // [N] CallLine
  int64_t counts_offset;   // [N] lines, word 0: the source's count row has arrived
  int64_t entries_offset;  // [N][kMaxPrepareBlocks] words: entries of the source's block have
                           // arrived
  int64_t ready_offset;    // [N][T] words: the source's staged row has arrived
  int64_t ready_stride;    // bytes from source to source
  int64_t lane_bytes;
  int64_t verdicts_offset;  // offset in the window of [kVerdictSlots][W] VerdictLine
  int64_t window_bytes;

  explicit FlagLayout(const GroupSizes& sizes) {
    const int64_t ranks = sizes.ep_size;
    calls_offset = 0;
    counts_offset = calls_offset + ranks * kFlagLine;
    entries_offset = counts_offset + ranks * kFlagLine;
    ready_offset = entries_offset + ranks * kMaxPrepareBlocks * 4;
    ready_stride = AlignUp(sizes.max_tokens_per_rank * 4, kFlagLine);
    lane_bytes = AlignUp(ready_offset + ranks * ready_stride, kPageBytes);
    verdicts_offset = WindowBytes(sizes) + sizes.lanes * lane_bytes;
    window_bytes =
        AlignUp(verdicts_offset + kVerdictSlots * sizes.world_size * kFlagLine, kPageBytes);
  }
};

// Returns the bytes of device memory through which blocks of one rank's kernels exchange data.
inline int64_t ScratchBytes(const GroupSizes& sizes) {
  return 4 * (kMaxPrepareBlocks * sizes.physical_experts() + 3 * kMaxBlocks * kMaxRanks);
}

// Totals of one handle on one rank since the group opened. Only a node's first rank has `calls`.
struct HandleTotals {
  uint64_t calls;
  uint64_t rows;
  uint64_t dropped_rows;
  uint64_t rounds;
};

// Start of a call, in one sector, so that one access reads all of it.
struct alignas(32) CallStart {
  uint64_t epoch;
  uint64_t now_ns;    // start time by the board's clock
  uint64_t timer_ns;  // start time by the device's clock
  uint32_t index;     // number of the handle's record
};

// Number of the record and duration of the previous call.
struct alignas(32) LastCall {
  uint64_t epoch;
  uint64_t took_ns;
  uint32_t index;  // number of the handle's record
  uint32_t op;     // OpCode
};

// A rank's sums for its tally on the board; tally.cuh updates the sums.
struct DeviceTally {
  LastCall last;
  // How long this rank waited for each EP rank, in calls of even and of odd epochs.
  uint32_t waits[2][kMaxRanks];
  uint8_t* sums;   // device copy of the tally on the board
  uint8_t* board;  // host-mapped
  int64_t peers_offset;
  int64_t loads_offset;
  int64_t load_bytes;
  int64_t experts;  // L
};

// Progress that a rank reports on the board; progress.cuh writes it. The host fills the pointers; a
// null pointer reports nothing.
struct Progress {
  CallStart start;         // start of the running call
  const uint64_t* now_ns;  // host-mapped BoardHeader::now_ns
  void* rank;              // host-mapped RankRecord
  void* handles;           // host-mapped [kMaxHandles] HandleRecord
  void* device_rows;       // host-mapped [kMaxHandles] DeviceRows of this rank
  HandleTotals* totals;    // [kMaxHandles], device
  uint64_t rows;           // rows of all calls
  uint64_t dropped_rows;
  bool counts_calls;  // true: this rank counts calls for all ranks of the node's board
  DeviceTally tally;
};

// One per (group, device), in device memory that is never freed: a replayed CUDA graph of a closed
// group finds `open` at 0 here. The host writes fields up to `scratch` before the first call. The
// fields after `scratch` belong to the kernels, which run one after another on one stream.
struct DeviceGroup {
  uint64_t generation;
  uint8_t* windows;       // EP rank r of this domain has its window at windows + r * window_stride
  int64_t window_stride;  // bytes
  int32_t ep_rank;
  int32_t ep_size;
  int32_t first_rank;  // world rank of EP rank 0 of this domain
  int32_t world_size;
  int32_t lanes;        // at least 2, because successive calls must use different lanes
  int32_t num_experts;  // includes slots for copies
  int64_t max_tokens;
  int64_t lane_bytes;
  int64_t source_entries_bytes;
  int64_t source_counts_bytes;
  int64_t entries_offset;
  int64_t counts_offset;
  int64_t flags_offset;  // offset in the window of lane 0's flags
  int64_t flag_lane_bytes;
  int64_t flag_counts_offset;
  int64_t flag_entries_offset;
  int64_t ready_offset;
  int64_t ready_stride;
  int64_t verdicts_offset;
  uint64_t budget_ns;
  const uint64_t* poison_generation;  // host-mapped word of the board
  FailRecord* record;                 // host-mapped
  BadIndex* bad_index;                // host-mapped; null: indices are not checked
  int32_t* scratch;                   // ScratchBytes

  uint32_t open;     // the host clears it when the group closes
  uint32_t failed;   // set by the first failing wait, never cleared
  uint32_t spoiled;  // set by the first bad index, never cleared
  uint64_t epoch;    // epoch of the last call that ended
  uint64_t verdicts;
  uint32_t arrived[kBarriers];
  uint32_t ended;  // blocks of the running kernel that have ended
  Progress progress;
};

// Fills all fields of sizes and offsets. The caller fills addresses, generation and budget.
// `first_rank` + `ep_rank` is the world rank.
inline void SetSizes(const GroupSizes& sizes, int64_t first_rank, int64_t ep_rank,
                     DeviceGroup* group) {
  const LaneLayout lane(sizes);
  const FlagLayout flags(sizes);
  group->ep_rank = static_cast<int32_t>(ep_rank);
  group->ep_size = static_cast<int32_t>(sizes.ep_size);
  group->first_rank = static_cast<int32_t>(first_rank);
  group->world_size = static_cast<int32_t>(sizes.world_size);
  group->lanes = static_cast<int32_t>(sizes.lanes);
  group->num_experts = static_cast<int32_t>(sizes.physical_experts());
  group->max_tokens = sizes.max_tokens_per_rank;
  group->lane_bytes = lane.lane_bytes;
  group->source_entries_bytes = lane.source_entries_bytes;
  group->source_counts_bytes = lane.source_counts_bytes;
  group->entries_offset = lane.entries_offset;
  group->counts_offset = lane.counts_offset;
  group->flags_offset = WindowBytes(sizes);
  group->flag_lane_bytes = flags.lane_bytes;
  group->flag_counts_offset = flags.counts_offset;
  group->flag_entries_offset = flags.entries_offset;
  group->ready_offset = flags.ready_offset;
  group->ready_stride = flags.ready_stride;
  group->verdicts_offset = flags.verdicts_offset;
}

// Identifies the call to its peers and in records.
struct CallName {
  uint64_t layer_id;           // id of layer 0 of a stack
  const int32_t* layer_index;  // [1] int32, device, written by XLA; null: 0
  uint32_t handle;
  // The handle's record on the board is board_index + layer index * board_stride.
  uint32_t board_index = 0;
  uint32_t board_stride = 0;
  // [1], device, the same on every rank: 0 if this launch has nothing to do. Null: always runs.
  const int32_t* wanted = nullptr;
};

// All arrays of a plan are int32 in device memory.
using Plan = PlanArrays<const int32_t>;
using MutablePlan = PlanArrays<int32_t>;

// Static sizes of one call.
struct CallSizes {
  int32_t tokens;    // T of this call, at most max_tokens
  int32_t top_k;     // K
  int32_t capacity;  // C
  int32_t experts;   // L
  int32_t width;     // H elements; not used by prepare
};

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_DEVICE_DEVICE_GROUP_H_
