"""Layout of a group's shared memory, and the daemon's writes to its board.

A group has one *window* per world rank (the rank's staging memory) and one *board*: memory that the
daemon and all processes of the group map. Clients write telemetry to the board and synchronize
through it. The daemon formats the board, reads records from it and poisons it, but never waits for
it.

`board_abi.py` has the structs, and `board_records.py` reads records. This module does not need JAX
or the native library. Letters: `layout.py`; W ranks of the world, D domains, W = D * N.
In a group with `node_size`, only the ranks of an EP group on one node share windows. In this module
N is then node_size, T the tokens of all ranks of a rail, and E the experts of a node. A host has
windows of its own ranks, and one board.

A window has `lanes` lanes. A lane has `lane_rows` rows of H * B bytes, then entries
[N][T * max_top_k * 8], then counts [N][(E + 2 * N) * 4]. Each source's entries and counts start on
a 64-byte line, each lane on a page.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from ep_runtime.board_abi import (
    FAILURE_RECORDS,
    LINE_BYTES,
    MAGIC,
    MAX_HANDLES,
    MAX_LOADS,
    MAX_MEETING_RANKS,
    MEETING_SLOTS,
    PAGE_BYTES,
    TALLY_OPS,
    VERSION,
    BoardHeaderStruct,
    ControlStruct,
    DeviceRowsStruct,
    FailureRecordStruct,
    HandleRecordStruct,
    HandleState,
    LaneStruct,
    LoadRecordStruct,
    MeetingSlotStruct,
    OpCode,
    OpRecordStruct,
    PeerRecordStruct,
    PoisonReason,
    RankRecordStruct,
    RankState,
)
from ep_runtime.device_layout import flag_bytes, lane_rows, on_device
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layout import align_up
from ep_runtime.specs import DTYPE_BYTES, STATE, GroupSpec
from ep_runtime.text import printable

__all__ = [
    "BoardHeader",
    "BoardHeaderStruct",
    "BoardLayout",
    "By",
    "ControlStruct",
    "DeviceRowsStruct",
    "FAILURE_RECORDS",
    "FailureRecordStruct",
    "HandleRecordStruct",
    "HandleState",
    "LINE_BYTES",
    "LaneStruct",
    "MAGIC",
    "MAX_HANDLES",
    "MAX_MEETING_RANKS",
    "MEETING_SLOTS",
    "MeetingSlotStruct",
    "NOBODY",
    "OpCode",
    "PAGE_BYTES",
    "PoisonReason",
    "RankRecordStruct",
    "RankState",
    "TallyLayout",
    "VERSION",
    "board_bytes",
    "board_layout",
    "control_bytes",
    "format_board",
    "lane_bytes",
    "poison",
    "poisoned_by",
    "read_header",
    "tally_layout",
    "tell_time",
    "window_bytes",
]


@dataclasses.dataclass(frozen=True)
class By:
    """The process that ordered a poison; uid and pid are 0 if unknown.

    `note` has the order's host and reason.
    """

    uid: int
    pid: int
    note: str = ""

    def told(self, command: str) -> str:
        """Returns a text that says who ran `command`, for the end of a message."""
        who = f"uid {self.uid} (pid {self.pid})" if self.uid or self.pid else "an operator"
        return f"by {who} with {command}{self.note}"


NOBODY = By(0, 0)


@dataclasses.dataclass(frozen=True)
class BoardHeader:
    """The fields of a board's header."""

    generation: int
    poison_generation: int
    poison_reason: PoisonReason
    poison_rank: int
    poison_by: By
    world_size: int
    ep_size: int
    num_domains: int
    lanes: int
    window_bytes: int
    board_bytes: int


@dataclasses.dataclass(frozen=True)
class TallyLayout:
    """Offsets in one rank's tally, of ops, waits for peers and loads of experts.

    The ops [TALLY_OPS] come first. Peers [TALLY_OPS][N] and loads [MAX_LOADS] follow; each load
    has the rows of L experts.
    """

    peers_offset: int
    loads_offset: int
    load_bytes: int
    tally_bytes: int


@dataclasses.dataclass(frozen=True)
class BoardLayout:
    """Byte offsets of the parts of a board."""

    ranks_offset: int
    handles_offset: int
    failures_offset: int
    world_offset: int
    domains_offset: int
    domain_bytes: int
    tallies_offset: int  # tally of world rank 0, which the other ranks' tallies follow
    device_rows_offset: int  # 0 if windows are in host memory
    board_bytes: int


def _line(value: int) -> int:
    return align_up(value, LINE_BYTES)


def control_bytes(ranks: int, lanes: int) -> int:
    """Returns bytes, in whole pages, of the control block of `ranks` ranks and `lanes` lanes."""
    head = ctypes.sizeof(ControlStruct) + lanes * ctypes.sizeof(LaneStruct)
    phases = lanes * ranks * LINE_BYTES
    slots = MEETING_SLOTS * (4 + ctypes.sizeof(MeetingSlotStruct))
    return align_up(head + phases + slots, PAGE_BYTES)


def tally_layout(spec: GroupSpec) -> TallyLayout:
    """Returns the offsets of the parts of a rank's tally."""
    peers = TALLY_OPS * ctypes.sizeof(OpRecordStruct)
    loads = _line(peers + TALLY_OPS * spec.ranks_per_node * ctypes.sizeof(PeerRecordStruct))
    load = _line(ctypes.sizeof(LoadRecordStruct) + spec.experts_per_rank * 8)
    # Whole pages, because devices map tallies.
    return TallyLayout(peers, loads, load, align_up(loads + MAX_LOADS * load, PAGE_BYTES))


def board_layout(spec: GroupSpec) -> BoardLayout:
    """Returns the offsets of the parts of a group's board.

    Raises:
        InvalidArgumentError: the mesh has more devices than MAX_MEETING_RANKS.
    """
    if spec.world_size > MAX_MEETING_RANKS:
        raise InvalidArgumentError(
            f"mesh_axes must multiply to at most {MAX_MEETING_RANKS} devices, "
            f"got {spec.world_size}",
            argument="mesh",
        )
    ranks = align_up(ctypes.sizeof(BoardHeaderStruct), LINE_BYTES)
    handles = ranks + spec.world_size * ctypes.sizeof(RankRecordStruct)
    failures = align_up(handles + MAX_HANDLES * ctypes.sizeof(HandleRecordStruct), PAGE_BYTES)
    world = failures + FAILURE_RECORDS * ctypes.sizeof(FailureRecordStruct)
    domains = world + control_bytes(spec.world_size, 0)
    domain = control_bytes(spec.ranks_per_node, spec.lanes)
    tallies = domains + spec.world_size // spec.ranks_per_node * domain
    end = tallies + spec.world_size * tally_layout(spec).tally_bytes
    if not on_device(spec):
        return BoardLayout(ranks, handles, failures, world, domains, domain, tallies, 0, end)
    rows = end + spec.world_size * MAX_HANDLES * ctypes.sizeof(DeviceRowsStruct)
    return BoardLayout(ranks, handles, failures, world, domains, domain, tallies, end, rows)


def board_bytes(spec: GroupSpec) -> int:
    """Returns the bytes of the group's board."""
    return board_layout(spec).board_bytes


def lane_bytes(spec: GroupSpec) -> int:
    """Returns the bytes of one lane of one rank's window."""
    tokens, sources = spec.staged_tokens, spec.ranks_per_node
    rows = _line(lane_rows(spec) * spec.hidden_size * DTYPE_BYTES[spec.max_token_dtype])
    entries = sources * _line(tokens * spec.max_top_k * 8)
    experts = spec.experts_per_rank + spec.spare_experts
    counts = sources * _line(sources * (experts + 2) * 4)
    return align_up(rows + entries + counts, PAGE_BYTES)


def window_bytes(spec: GroupSpec) -> int:
    """Returns the bytes of one world rank's window: its lanes, and on a device also its flags.

    A window with transport STATE has one row of `hidden_size` bytes per token.
    """
    if spec.transport == STATE:
        return spec.max_tokens_per_rank * spec.hidden_size
    return spec.lanes * lane_bytes(spec) + (flag_bytes(spec) if on_device(spec) else 0)


def _at(buf: Any, kind: type[ctypes.Structure], offset: int) -> Any:
    return kind.from_buffer(buf, offset)


def format_board(buf: Any, spec: GroupSpec, generation: int) -> None:
    """Zeroes a board and writes its header. Call only while no client maps the board.

    Args:
        buf: writable buffer (mmap or memoryview) of at least `board_bytes(spec)` bytes.
        spec: the group.
        generation: the group's positive generation, which a later poison names.

    Raises:
        InvalidArgumentError: `buf` is too small.
    """
    where = board_layout(spec)
    view = memoryview(buf)
    if view.nbytes < where.board_bytes:
        raise InvalidArgumentError(
            f"buf must hold {where.board_bytes} bytes, got {view.nbytes}", argument="buf"
        )
    view.release()
    base = ctypes.addressof(ctypes.c_char.from_buffer(buf))
    ctypes.memset(base, 0, where.board_bytes)
    for offset, ranks, lanes in [(where.world_offset, spec.world_size, 0)] + [
        (where.domains_offset + domain * where.domain_bytes, spec.ranks_per_node, spec.lanes)
        for domain in range(spec.world_size // spec.ranks_per_node)
    ]:
        control = _at(buf, ControlStruct, offset)
        control.ranks, control.lanes = ranks, lanes
    header = _at(buf, BoardHeaderStruct, 0)
    header.version = VERSION
    header.world_size = spec.world_size
    header.generation = generation
    header.poison_rank = -1
    header.ep_size = spec.ranks_per_node
    header.num_domains = spec.world_size // spec.ranks_per_node
    header.lanes = spec.lanes
    header.max_handles = MAX_HANDLES
    header.meeting_slots = MEETING_SLOTS
    header.window_bytes = window_bytes(spec)
    header.board_bytes = where.board_bytes
    header.ranks_offset = where.ranks_offset
    header.handles_offset = where.handles_offset
    header.failures_offset = where.failures_offset
    header.world_offset = where.world_offset
    header.domains_offset = where.domains_offset
    header.domain_bytes = where.domain_bytes
    header.device_rows_offset = where.device_rows_offset
    header.tallies_offset = where.tallies_offset
    header.tally_bytes = tally_layout(spec).tally_bytes
    for rank in range(spec.world_size):
        record = _at(buf, RankRecordStruct, _rank_offset(where.ranks_offset, rank))
        record.waiting_for = record.lane = -1
    header.magic = MAGIC  # written last, so that readers that see it see the rest


def _rank_offset(ranks_offset: int, rank: int) -> int:
    return ranks_offset + rank * ctypes.sizeof(RankRecordStruct)


def poison(
    buf: Any, generation: int, reason: PoisonReason, rank: int = -1, by: By = NOBODY
) -> None:
    """Ends all waits and calls of `generation` and older ones, within the clients' wait slice.

    Poison is never removed; a later generation uses the same board.

    Args:
        buf: the board.
        generation: the latest generation to end.
        reason: selects the error that clients raise.
        rank: a world rank of the process that was lost or fenced, else -1.
        by: the process that gave the order.
    """
    header = _at(buf, BoardHeaderStruct, 0)  # unchecked, because clients may have overwritten it
    if header.poison_generation >= generation:
        return
    header.poison_reason = int(reason)
    header.poison_rank = rank
    header.poison_uid, header.poison_pid = by.uid, by.pid
    header.poison_note = _cut(by.note)
    header.poison_generation = generation  # written last, because clients poll this word


def _cut(note: str) -> bytes:
    """Encodes a note, cut at a whole character to fit the header."""
    data, most = note.encode(), BoardHeaderStruct.poison_note.size - 1
    if len(data) <= most:
        return data
    return data[: most - 3].decode(errors="ignore").encode() + b"..."


def poisoned_by(header: BoardHeaderStruct) -> By:
    """Reads from a header which process ordered the poison."""
    note = printable(header.poison_note.decode(errors="replace"))
    return By(header.poison_uid, header.poison_pid, note)


def tell_time(buf: Any, now_ns: int) -> None:
    """Writes CLOCK_MONOTONIC for devices, which use the latest value in their records."""
    _at(buf, BoardHeaderStruct, 0).now_ns = now_ns


def _header(buf: Any) -> Any:
    header = _at(buf, BoardHeaderStruct, 0)
    if header.magic != MAGIC or header.version != VERSION:
        raise InvalidArgumentError(
            f"buf must hold a board of version {VERSION}, "
            f"got magic {header.magic:#x} version {header.version}",
            argument="buf",
        )
    return header


def read_header(buf: Any) -> BoardHeader:
    """Reads a board's header. Raises InvalidArgumentError if `buf` is not a formatted board."""
    header = _header(buf)
    return BoardHeader(
        generation=header.generation,
        poison_generation=header.poison_generation,
        poison_reason=PoisonReason(header.poison_reason),
        poison_rank=header.poison_rank,
        poison_by=poisoned_by(header),
        world_size=header.world_size,
        ep_size=header.ep_size,
        num_domains=header.num_domains,
        lanes=header.lanes,
        window_bytes=header.window_bytes,
        board_bytes=header.board_bytes,
    )
