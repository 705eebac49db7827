"""The structs, enums and constants of a group's board, which mirror `csrc/core/memory/board.h`.

Loading the native library compares its structs with these. All integers are little-endian and
naturally aligned. Each struct is a multiple of 64-byte lines.
"""

from __future__ import annotations

import ctypes
import enum

MAGIC = int.from_bytes(b"EPBOARD1", "little")
VERSION = 5
MAX_HANDLES = 16384
MAX_LOADS = 1024  # the board has loads of the first MAX_LOADS handles
TALLY_OPS = 8  # one for each OpCode before COPIES
TIME_BUCKETS = 24
BUCKET_BITS = 12  # bucket b counts calls shorter than 2 ** (BUCKET_BITS + b) ns
MEETING_SLOTS = 4096
MAX_WORLD_RANKS = 8192  # ranks of a mesh; a bound on what callers may ask for
FAILURE_RECORDS = 128
LINE_BYTES = 64
PAGE_BYTES = 4096


class PoisonReason(enum.IntEnum):
    """Reasons for poisoning a generation."""

    NONE = 0
    CLOSED = 1
    RECLAIMED = 2
    FENCED = 3
    PEER_LOST = 4


class OpCode(enum.IntEnum):
    """Operations of calls."""

    NONE = 0
    PREPARE = 1
    DISPATCH = 2
    COMBINE = 3
    DISPATCH_BWD = 4
    COMBINE_BWD = 5
    BLOCK = 6
    BLOCK_BWD = 7
    COPIES = 8


class HandleState(enum.IntEnum):
    """States of a handle."""

    IDLE = 0  # never used, or combined
    OPEN = 1  # prepared or dispatched, not combined yet
    BUSY = 2  # a call on this handle is running


class RankState(enum.IntEnum):
    """States of a rank."""

    IDLE = 0
    MEETING = 1  # waits for peers to arrive at a call, or for a lane
    RUNNING = 2
    WAITING = 3  # waits inside a call, for a peer's rows


class BoardHeaderStruct(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("generation", ctypes.c_uint64),
        ("poison_generation", ctypes.c_uint64),
        ("poison_reason", ctypes.c_uint32),
        ("poison_rank", ctypes.c_int32),
        ("ep_size", ctypes.c_uint32),
        ("num_domains", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("max_handles", ctypes.c_uint32),
        ("meeting_slots", ctypes.c_uint32),
        ("num_here", ctypes.c_uint32),  # ranks of this node
        ("window_bytes", ctypes.c_uint64),
        ("board_bytes", ctypes.c_uint64),
        ("ranks_offset", ctypes.c_uint64),
        ("handles_offset", ctypes.c_uint64),
        ("world_offset", ctypes.c_uint64),
        ("domains_offset", ctypes.c_uint64),
        ("domain_bytes", ctypes.c_uint64),
        ("failures_offset", ctypes.c_uint64),
        ("failures", ctypes.c_uint64),
        ("now_ns", ctypes.c_uint64),
        ("device_rows_offset", ctypes.c_uint64),
        ("tallies_offset", ctypes.c_uint64),
        ("tally_bytes", ctypes.c_uint64),
        ("seats_offset", ctypes.c_uint64),
        ("poison_uid", ctypes.c_uint32),
        ("poison_pid", ctypes.c_uint32),
        ("poison_note", ctypes.c_char * 80),
        ("reserved", ctypes.c_uint8 * 56),
    ]


class RankRecordStruct(ctypes.Structure):
    _fields_ = [
        ("sequence", ctypes.c_uint32),  # odd while the record is being written
        ("state", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("waiting_for", ctypes.c_int32),
        ("layer_id", ctypes.c_uint64),
        ("handle", ctypes.c_uint32),
        ("lane", ctypes.c_int32),
        ("epoch", ctypes.c_uint64),
        ("since_ns", ctypes.c_uint64),
        ("progress_ns", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("dropped_rows", ctypes.c_uint64),
        ("open_calls", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("left", ctypes.c_uint32),  # 1 once the rank's process has closed the group
        ("reserved", ctypes.c_uint8 * 36),
    ]


class HandleRecordStruct(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_uint32),
        ("last_op", ctypes.c_uint32),
        ("lane", ctypes.c_int32),
        ("reserved0", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("dropped_rows", ctypes.c_uint64),
        ("updated_ns", ctypes.c_uint64),
        ("rounds", ctypes.c_uint64),
    ]


class DeviceRowsStruct(ctypes.Structure):
    """Rows of one handle that a rank on a device counts itself.

    Devices cannot add atomically to a handle's record, which is in host memory.
    """

    _fields_ = [("rows", ctypes.c_uint64), ("dropped_rows", ctypes.c_uint64)]


class OpRecordStruct(ctypes.Structure):
    """Times of one rank's calls of one op, and their waits for peers."""

    _fields_ = [
        ("calls", ctypes.c_uint64),
        ("time_ns", ctypes.c_uint64),
        ("wait_ns", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 5),
        ("times", ctypes.c_uint64 * TIME_BUCKETS),
        ("waits", ctypes.c_uint64 * TIME_BUCKETS),
    ]


class PeerRecordStruct(ctypes.Structure):
    """Waits of one rank's calls of one op for one peer."""

    _fields_ = [("arrival_ns", ctypes.c_uint64), ("wait_ns", ctypes.c_uint64)]


class LoadRecordStruct(ctypes.Structure):
    """Times and tokens of one handle's calls on one rank; u64 rows per local expert follow."""

    _fields_ = [
        ("calls", ctypes.c_uint64),
        ("time_ns", ctypes.c_uint64),
        ("wait_ns", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
    ]


class FailureRecordStruct(ctypes.Structure):
    _fields_ = [
        ("ticket", ctypes.c_uint64),
        ("site_name", ctypes.c_uint64),
        ("launch", ctypes.c_uint32),
        ("code", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("text", ctypes.c_uint8 * 996),
    ]


class ControlStruct(ctypes.Structure):
    """Head of the memory in which ranks meet: one for each domain, and one for the whole group.

    The group's head has no lanes. Lanes [lanes], phase words [lanes][ranks], hash heads u32
    [MEETING_SLOTS] and meeting slots [MEETING_SLOTS] follow the head, each on a new line.
    `board.slot_bytes` gives the bytes of a slot.
    """

    _fields_ = [
        ("lock", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("open_meetings", ctypes.c_uint32),
        ("ready_head", ctypes.c_uint32),
        ("ready_tail", ctypes.c_uint32),
        ("free_slot", ctypes.c_uint32),
        ("used_slots", ctypes.c_uint32),
        ("next_epoch", ctypes.c_uint64),
        ("owner", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 20),
    ]


class LaneStruct(ctypes.Structure):
    _fields_ = [
        ("busy", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("failed", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 44),
    ]


class MeetingSlotStruct(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_uint32),
        ("inside", ctypes.c_uint32),
        ("key", ctypes.c_uint64 * 2),
        ("layer_id", ctypes.c_uint64),
        ("op", ctypes.c_uint32),
        ("handle", ctypes.c_uint32),
        ("lane", ctypes.c_int32),
        ("hash_next", ctypes.c_uint32),
        ("ready_next", ctypes.c_uint32),
        ("verdict_rank", ctypes.c_int32),
        ("epoch", ctypes.c_uint64),
        ("opened_ns", ctypes.c_uint64),
        ("verdict_demand", ctypes.c_int64),
        ("verdict_capacity", ctypes.c_int64),
        ("changed_ns", ctypes.c_uint64),
        ("site_name", ctypes.c_uint64),
        ("site_ordinal", ctypes.c_uint32),
        ("repetition", ctypes.c_uint32),
        ("run", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64 * 1),  # a bit per rank; more words follow for over 64 ranks
    ]


# The structs by their C names.
STRUCTS = {
    "BoardHeader": BoardHeaderStruct,
    "RankRecord": RankRecordStruct,
    "HandleRecord": HandleRecordStruct,
    "DeviceRows": DeviceRowsStruct,
    "OpRecord": OpRecordStruct,
    "PeerRecord": PeerRecordStruct,
    "LoadRecord": LoadRecordStruct,
    "FailureRecord": FailureRecordStruct,
    "Control": ControlStruct,
    "Lane": LaneStruct,
    "MeetingSlot": MeetingSlotStruct,
}
CONSTANTS = {
    "kBoardMagic": MAGIC,
    "kBoardVersion": VERSION,
    "kMaxHandles": MAX_HANDLES,
    "kMaxLoads": MAX_LOADS,
    "kTallyOps": TALLY_OPS,
    "kTimeBuckets": TIME_BUCKETS,
    "kBucketBits": BUCKET_BITS,
    "kMeetingSlots": MEETING_SLOTS,
    "kMaxWorldRanks": MAX_WORLD_RANKS,
    "kFailureRecords": FAILURE_RECORDS,
    "kLineBytes": LINE_BYTES,
    "kPageBytes": PAGE_BYTES,
}
