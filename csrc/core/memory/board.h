// The shared board of a group. `ep_runtime/board_abi.py` repeats these structs field by field and
// a test compares sizes and offsets; the daemon formats the board, clients write records and meet.
#ifndef EP_RUNTIME_CORE_MEMORY_BOARD_H_
#define EP_RUNTIME_CORE_MEMORY_BOARD_H_

#include <atomic>
#include <cstdint>

#include "core/base/futex.h"

namespace ep_runtime {

constexpr uint64_t kBoardMagic = 0x3144'5241'4F42'5045;  // "EPBOARD1" in memory
constexpr uint32_t kBoardVersion = 4;
constexpr uint32_t kMaxHandles = 16384;
constexpr uint32_t kMaxLoads = 1024;   // handles whose load the board has, from the first
constexpr uint32_t kTallyOps = 8;      // one for each OpCode
constexpr uint32_t kTimeBuckets = 24;  // see BucketOf
constexpr uint32_t kBucketBits = 12;
constexpr uint32_t kMeetingSlots = 4096;
constexpr int64_t kMaxMeetingRanks = 1024;
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
  kBlock = 6,  // of this and the next, records hold the parts: the ops above
  kBlockBwd = 7
};

inline const char* OpName(OpCode op) {
  static constexpr const char* kNames[] = {"none",         "prepare",     "dispatch", "combine",
                                           "dispatch_bwd", "combine_bwd", "block",    "block_bwd"};
  return kNames[static_cast<uint32_t>(op)];
}

enum class HandleState : uint32_t { kIdle = 0, kOpen = 1, kBusy = 2 };

enum class RankState : uint32_t { kIdle = 0, kMeeting = 1, kRunning = 2, kWaiting = 3 };

struct BoardHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t world_size;
  uint64_t generation;
  Word64 poison_generation;  // a client leaves when this reaches its own generation
  std::atomic<uint32_t> poison_reason;
  std::atomic<int32_t> poison_rank;
  uint32_t ep_size;
  uint32_t num_domains;
  uint32_t lanes;
  uint32_t max_handles;
  uint32_t meeting_slots;
  uint32_t reserved0;
  uint64_t window_bytes;
  uint64_t board_bytes;
  uint64_t ranks_offset;
  uint64_t handles_offset;
  uint64_t world_offset;
  uint64_t domains_offset;
  uint64_t domain_bytes;
  uint64_t failures_offset;
  Word64 failures;  // failure records claimed so far
  // CLOCK_MONOTONIC as the daemon and the processes last wrote it: a device knows no other.
  Word64 now_ns;
  uint64_t device_rows_offset;  // [W][kMaxHandles] DeviceRows; 0 where windows are in host memory
  uint64_t tallies_offset;      // [W] tallies of `tally_bytes` each: memory/tally.h
  uint64_t tally_bytes;
  // Who had it poisoned, both 0 where nobody says: whoever gave an order, or replaced the group.
  std::atomic<uint32_t> poison_uid;
  std::atomic<uint32_t> poison_pid;
  char poison_note[80];  // host and reason, UTF-8 with a zero at its end
};
static_assert(sizeof(BoardHeader) == 256);

// Written by the one process that drives the rank; `sequence` is odd while it writes.
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
  uint32_t pid;  // of the process that drives the rank, as it sees itself
  Word left;     // 1 once that process has closed the group: the rank joins no further call
  uint8_t reserved[36];
};
static_assert(sizeof(RankRecord) == 128);

// Written by every rank of the group, so counters are atomic and the rest is last-writer-wins.
// Devices only store: calls where they drive a node's first rank, rounds where they drive an EP
// group's first rank and the word is less, rows and dropped_rows never.
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
  // Parts that calls ran beyond one each, as a rank had more rows than their workspace holds; of
  // the EP group that ran the most.
  Word64 rounds;
};
static_assert(sizeof(HandleRecord) == 64);

// What one rank on a device adds to a handle's record: it cannot add to a word of host memory.
struct DeviceRows {
  uint64_t rows;
  uint64_t dropped_rows;
};
static_assert(sizeof(DeviceRows) == 16, "stored at once");

// What the calls of one op took on one rank since the group was formed. `wait_ns` of it they waited
// for peers.
struct OpRecord {
  Word64 calls;
  Word64 time_ns;
  Word64 wait_ns;
  uint64_t reserved[5];
  Word64 times[kTimeBuckets];  // calls by their time
  Word64 waits[kTimeBuckets];  // and by their wait
};
static_assert(sizeof(OpRecord) == 448);

// Of what one rank's calls of one op waited for one peer.
struct PeerRecord {
  Word64 arrival_ns;  // by how much the peer came after this rank, added up
  Word64 wait_ns;     // of the rank's wait what this peer ended, as the last to come
};
static_assert(sizeof(PeerRecord) == 16, "stored at once");

// What one handle's calls took and brought on one rank; rows by local expert follow, u64 [L].
struct LoadRecord {
  Word64 calls;
  Word64 time_ns;
  Word64 wait_ns;
  Word64 tokens;  // that the rank has sent on their way: of calls of prepare
};
static_assert(sizeof(LoadRecord) == 32);

// Bucket b of a histogram counts what took less than 2^(kBucketBits + b) ns, and no less than half
// of it; the last one whatever took longer.
constexpr uint32_t BucketOf(uint64_t ns) {
  uint32_t bucket = 0;
  for (uint64_t left = ns >> kBucketBits; left != 0 && bucket < kTimeBuckets - 1; left >>= 1) {
    ++bucket;
  }
  return bucket;
}

// One failed run, told to the other processes. A ring: record n lies at n mod kFailureRecords.
struct FailureRecord {
  Word64 ticket;       // n + 1 once the rest is written
  uint64_t site_name;  // a call site that the run had reached, as all processes name it
  uint32_t launch;     // of the program that has it
  uint32_t code;
  uint32_t bytes;
  char text[996];
};
static_assert(sizeof(FailureRecord) == 1024);

// Head of a meeting place; lanes, phase words, hash heads and slots follow. Indices into slots
// are stored plus one, so that a zeroed board is an empty one.
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

// How far one source is inside the call that holds a lane.
struct PhaseWord {
  Word phase;
  uint32_t reserved0;
  Word64 joined_ns;  // when it came to that call
  uint8_t reserved[48];
};
static_assert(sizeof(PhaseWord) == 64);

enum SlotState : uint32_t {
  kSlotFree = 0,
  kSlotGathering = 1,
  kSlotQueued = 2,  // everybody is here, no lane is free
  kSlotGranted = 3,
  kSlotFailed = 4
};

struct MeetingSlot {
  Word state;  // the futex word of the ranks that wait here
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
  Word64 arrived[kMaxMeetingRanks / 64];
  uint64_t changed_ns;  // the last arrival
  uint64_t site_name;   // the same in every process, 0 where one process drives all ranks
  uint32_t site_ordinal;
  uint32_t repetition;
  uint64_t run;  // as XLA names it in the process that came first; another may name it otherwise
  uint8_t reserved[8];
};
static_assert(sizeof(MeetingSlot) == 256);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_BOARD_H_
