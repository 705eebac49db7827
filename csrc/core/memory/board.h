// The shared board of a group. `ep_runtime/board_abi.py` repeats these structs field by field, and
// a test compares sizes and offsets. The daemon formats the board; clients write records and join
// calls on it.
#ifndef EP_RUNTIME_CORE_MEMORY_BOARD_H_
#define EP_RUNTIME_CORE_MEMORY_BOARD_H_

#include <atomic>
#include <cstdint>

#include "core/base/futex.h"

namespace ep_runtime {

constexpr uint64_t kBoardMagic = 0x3144'5241'4F42'5045;  // "EPBOARD1" in memory
constexpr uint32_t kBoardVersion = 5;
constexpr uint32_t kMaxHandles = 16384;
constexpr uint32_t kMaxLoads = 1024;   // only handles below this have their load on the board
constexpr uint32_t kTallyOps = 8;      // one for each OpCode before kCopies
constexpr uint32_t kTimeBuckets = 24;  // see BucketOf
constexpr uint32_t kBucketBits = 12;
constexpr uint32_t kMeetingSlots = 4096;
constexpr int64_t kMaxWorldRanks = 8192;
constexpr uint32_t kFailureRecords = 128;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPageBytes = 4096;

using Word64 = std::atomic<uint64_t>;
static_assert(Word64::is_always_lock_free, "the board is shared between processes");

enum class PoisonReason : uint32_t {
  kNone = 0,
  kClosed = 1,
  kReclaimed = 2,
  kFenced = 3,
  kPeerLost = 4
};

enum class OpCode : uint32_t {
  kNone = 0,
  kPrepare = 1,
  kDispatch = 2,
  kCombine = 3,
  kDispatchBwd = 4,
  kCombineBwd = 5,
  kBlock = 6,  // records do not show this: while block calls run, they show the ops above
  kBlockBwd = 7,
  kCopies = 8  // weights of copied experts, or their gradients
};

inline const char* OpName(OpCode op) {
  static constexpr const char* kNames[] = {"none",    "prepare",      "dispatch",
                                           "combine", "dispatch_bwd", "combine_bwd",
                                           "block",   "block_bwd",    "copies"};
  return kNames[static_cast<uint32_t>(op)];
}

enum class HandleState : uint32_t { kIdle = 0, kOpen = 1, kBusy = 2 };

enum class RankState : uint32_t { kIdle = 0, kMeeting = 1, kRunning = 2, kWaiting = 3 };

struct BoardHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t world_size;
  uint64_t generation;
  Word64 poison_generation;  // a client leaves once this is at least its own generation
  std::atomic<uint32_t> poison_reason;
  std::atomic<int32_t> poison_rank;
  uint32_t ep_size;
  uint32_t num_domains;  // domains that meet on this board; 0 if windows are in device memory
  uint32_t lanes;
  uint32_t max_handles;
  uint32_t meeting_slots;
  uint32_t num_here;  // ranks of this node, which have seats; a seat is the index of a record
  uint64_t window_bytes;
  uint64_t board_bytes;
  uint64_t ranks_offset;  // [num_here] RankRecord
  uint64_t handles_offset;
  uint64_t world_offset;    // 0 unless all ranks of the group meet on this board
  uint64_t domains_offset;  // [num_domains], `domain_bytes` each, by seat of their first ranks
  uint64_t domain_bytes;
  uint64_t failures_offset;
  Word64 failures;  // failure records claimed so far
  // CLOCK_MONOTONIC as the daemon or a process last wrote it, because devices cannot read that
  // clock.
  Word64 now_ns;
  uint64_t device_rows_offset;  // [num_here][kMaxHandles] DeviceRows; 0 if windows are in host
                                // memory
  uint64_t tallies_offset;      // [num_here] tallies of `tally_bytes` each, see memory/tally.h
  uint64_t tally_bytes;
  uint64_t seats_offset;  // u32 [W]: a world rank's seat plus one; 0 for a rank of another node
  // The process that ordered the poison or replaced the group; both 0 if unknown.
  std::atomic<uint32_t> poison_uid;
  std::atomic<uint32_t> poison_pid;
  char poison_note[80];  // host and reason, UTF-8 with a zero at its end
  uint8_t reserved[56];
};
static_assert(sizeof(BoardHeader) == 320);

// Record of a rank, written by the one process that drives the rank. `sequence` is odd during a
// write.
struct RankRecord {
  Word sequence;
  uint32_t state;
  uint32_t op;
  int32_t waiting_for;
  uint64_t layer_id;
  uint32_t handle;
  int32_t lane;
  uint64_t epoch;
  uint64_t since_ns;
  uint64_t progress_ns;
  uint64_t calls;
  uint64_t rows;
  uint64_t dropped_rows;
  uint32_t open_calls;
  uint32_t pid;  // pid of the process that drives the rank, in that process's pid namespace
  Word left;     // 1: that process has closed the group, and the rank joins no further call
  uint8_t reserved[36];
};
static_assert(sizeof(RankRecord) == 128);

// Record of a handle. Every rank of the group writes it, so counters are atomic; other fields keep
// the last write. Devices can store but not add. A node's first rank stores `calls`, and an EP
// group's first rank stores `rounds` if the present value is smaller; devices never store `rows` or
// `dropped_rows`.
struct HandleRecord {
  Word state;
  Word last_op;
  std::atomic<int32_t> lane;
  uint32_t reserved0;
  Word64 epoch;
  Word64 calls;
  Word64 rows;
  Word64 dropped_rows;
  Word64 updated_ns;
  // Chunks that calls ran beyond the first, because a rank had more rows than its workspace holds.
  // The value is of the EP group that ran the most.
  Word64 rounds;
};
static_assert(sizeof(HandleRecord) == 64);

// Rows that one rank on a device adds to a handle's record, because a device cannot add to a word
// of host memory.
struct DeviceRows {
  uint64_t rows;
  uint64_t dropped_rows;
};
static_assert(sizeof(DeviceRows) == 16, "stored at once");

// Time of one op's calls on one rank since the group formed. `wait_ns` is the part of `time_ns`
// spent waiting for peers.
struct OpRecord {
  Word64 calls;
  Word64 time_ns;
  Word64 wait_ns;
  uint64_t reserved[5];
  Word64 times[kTimeBuckets];  // histogram of calls by time
  Word64 waits[kTimeBuckets];  // histogram of calls by wait
};
static_assert(sizeof(OpRecord) == 448);

// How long one rank's calls of one op waited for one peer.
struct PeerRecord {
  Word64 arrival_ns;  // sum of how much later than this rank the peer joined
  Word64 wait_ns;     // sum of the rank's waits that this peer ended, as the last to join
};
static_assert(sizeof(PeerRecord) == 16, "stored at once");

// Load of one handle's calls on one rank. It is followed by u64 [L], the rows of each local expert.
struct LoadRecord {
  Word64 calls;
  Word64 time_ns;
  Word64 wait_ns;
  Word64 tokens;  // tokens that prepare has routed
};
static_assert(sizeof(LoadRecord) == 32);

// Returns the bucket of a time. Bucket b counts times from 2^(kBucketBits + b - 1) to
// 2^(kBucketBits + b) ns. The first bucket also counts all shorter times, the last all longer
// times.
constexpr uint32_t BucketOf(uint64_t ns) {
  uint32_t bucket = 0;
  for (uint64_t left = ns >> kBucketBits; left != 0 && bucket < kTimeBuckets - 1; left >>= 1) {
    ++bucket;
  }
  return bucket;
}

// One failed run, for other processes to read. Records are a ring: failure n is record n mod
// kFailureRecords.
struct FailureRecord {
  Word64 ticket;       // n + 1 once the other fields are written
  uint64_t site_name;  // a call site that the run reached, by the name that all processes share
  uint32_t launch;     // number of the launch of the program with that site
  uint32_t code;
  uint32_t bytes;
  char text[996];
};
static_assert(sizeof(FailureRecord) == 1024);

// Head of a meeting place. It is followed by lanes, phase words, hash heads and slots. Slot indices
// are stored plus one, so that a zeroed board is empty.
struct Control {
  Word lock;
  uint32_t ranks;
  uint32_t lanes;
  uint32_t open_meetings;
  uint32_t ready_head;
  uint32_t ready_tail;
  uint32_t free_slot;
  uint32_t used_slots;
  uint64_t next_epoch;
  Word owner;  // pid of the lock's last holder
  uint8_t reserved[20];
};
static_assert(sizeof(Control) == 64);

struct Lane {
  uint32_t busy;
  uint32_t slot;
  uint64_t epoch;
  Word failed;
  uint8_t reserved[44];
};
static_assert(sizeof(Lane) == 64);

// Progress of one source in the call that holds a lane.
struct PhaseWord {
  Word phase;
  uint32_t reserved0;
  Word64 joined_ns;  // when the source joined that call
  uint8_t reserved[48];
};
static_assert(sizeof(PhaseWord) == 64);

enum SlotState : uint32_t {
  kSlotFree = 0,
  kSlotGathering = 1,
  kSlotQueued = 2,  // all ranks have joined, but no lane is free
  kSlotGranted = 3,
  kSlotFailed = 4
};

// A slot takes SlotBytes(ranks), because `arrived` has as many words as the ranks need.
struct MeetingSlot {
  Word state;  // futex word that the slot's ranks wait on
  uint32_t inside;
  uint64_t key[2];
  uint64_t layer_id;
  uint32_t op;
  uint32_t handle;
  int32_t lane;
  uint32_t hash_next;
  uint32_t ready_next;
  int32_t verdict_rank;
  uint64_t epoch;
  uint64_t opened_ns;
  int64_t verdict_demand;
  int64_t verdict_capacity;
  uint64_t changed_ns;  // time of the last arrival
  uint64_t site_name;   // the same in every process; 0 if one process drives all ranks
  uint32_t site_ordinal;
  uint32_t repetition;
  uint64_t run;  // XLA's id in the process that joined first; other processes may have other ids
  Word64 arrived[1];  // a bit per rank
};
static_assert(sizeof(MeetingSlot) == 128);

// Returns the number of words of `arrived`.
constexpr int64_t ArrivedWords(int64_t ranks) { return (ranks + 63) / 64; }

// Returns the bytes, in whole lines, of a meeting slot of `ranks` ranks.
constexpr int64_t SlotBytes(int64_t ranks) {
  const auto fixed = static_cast<int64_t>(sizeof(MeetingSlot) - sizeof(Word64));
  return (fixed + 8 * ArrivedWords(ranks) + kLineBytes - 1) / kLineBytes * kLineBytes;
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_BOARD_H_
