"""Layout of a group's shared memory, and the daemon's writes to its board.

A group has one *window* per world rank (the rank's staging memory) and one *board*: memory that the
daemon and all processes of the group map. Clients write telemetry to the board and synchronize
through it. The daemon formats the board, reads records from it and poisons it, but never waits for
it.

`board_abi.py` has the structs, and `board_records.py` reads records. This module does not need JAX
or the native library. Letters: `layout.py`; W ranks of the world, D domains, W = D * N.
In a group with `node_size`, only the ranks of an EP group on one node share windows. In this module
N is then node_size, T the tokens of all ranks of a rail, and E the experts of a node. A host has
windows of its own ranks, and one board with their records. A rank's *seat* is the index of its
records on its node's board.

A window has `lanes` lanes. A lane has `lane_rows` rows of H * B bytes, then entries
[N][T * max_top_k * 8], then counts [N][(E + 2 * N) * 4]. Each source's entries and counts start on
a 64-byte line, each lane on a page.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from ep_runtime.board_abi import (
    FAILURE_RECORDS,
    LINE_BYTES,
    MAGIC,
    MAX_HANDLES,
    MAX_LOADS,
    MAX_WORLD_RANKS,
    MEETING_SLOTS,
    PAGE_BYTES,
    TALLY_OPS,
    VERSION,
    BoardHeaderStruct,
    ControlStruct,
    DeviceRowsStruct,
    FailureRecordStruct,
    HandleRecordStruct,
    LaneStruct,
    LoadRecordStruct,
    MeetingSlotStruct,
    OpRecordStruct,
    PeerRecordStruct,
    PoisonReason,
    RankRecordStruct,
)
from ep_runtime.device_layout import flag_bytes, lane_rows, on_device
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layout import align_up
from ep_runtime.specs import DTYPE_BYTES, STATE, GroupSpec
from ep_runtime.text import printable

_Record = TypeVar("_Record")


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
    num_here: int
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
    """Byte offsets of the parts of one node's board.

    Attributes:
        spec: the group.
        ranks: the node's world ranks in ascending order. A rank's seat is its index here.
        ranks_offset: records of ranks, by seat.
        seats_offset: u32 [W], the seat of each world rank plus one; 0 for ranks of other nodes.
        world_offset: where all ranks of the group meet; 0 if they cannot meet on this board.
        domains_offset: where the ranks of each domain meet; 0 if they meet in device memory.
        num_domains: domains that meet on this board.
        tally: layout of each rank's tally.
        tallies_offset: tallies, by seat; 0 for a copy of a job's state, which has no calls.
        device_rows_offset: rows that devices count, by seat; 0 if windows are in host memory.
    """

    spec: GroupSpec
    ranks: tuple[int, ...]
    ranks_offset: int
    handles_offset: int
    failures_offset: int
    seats_offset: int
    world_offset: int
    domains_offset: int
    domain_bytes: int
    num_domains: int
    tally: TallyLayout
    tallies_offset: int
    device_rows_offset: int
    board_bytes: int

    def seat(self, rank: int) -> int | None:
        """Returns a world rank's seat; None if the rank is on another node."""
        index = bisect.bisect_left(self.ranks, rank)
        return index if index < len(self.ranks) and self.ranks[index] == rank else None


def _line(value: int) -> int:
    return align_up(value, LINE_BYTES)


def slot_bytes(ranks: int) -> int:
    """Returns bytes, in whole lines, of a meeting slot of `ranks` ranks."""
    return _line(MeetingSlotStruct.arrived.offset + align_up(ranks, 64) // 8)


def control_bytes(ranks: int, lanes: int) -> int:
    """Returns bytes, in whole pages, of the control block of `ranks` ranks and `lanes` lanes."""
    head = ctypes.sizeof(ControlStruct) + lanes * ctypes.sizeof(LaneStruct)
    phases = lanes * ranks * LINE_BYTES
    slots = MEETING_SLOTS * (4 + slot_bytes(ranks))
    return align_up(head + phases + slots, PAGE_BYTES)


def tally_layout(spec: GroupSpec) -> TallyLayout:
    """Returns the offsets of the parts of a rank's tally."""
    peers = TALLY_OPS * ctypes.sizeof(OpRecordStruct)
    loads = _line(peers + TALLY_OPS * spec.ranks_per_node * ctypes.sizeof(PeerRecordStruct))
    load = _line(ctypes.sizeof(LoadRecordStruct) + spec.experts_per_rank * 8)
    # Whole pages, because devices map tallies.
    return TallyLayout(peers, loads, load, align_up(loads + MAX_LOADS * load, PAGE_BYTES))


def check_world(spec: GroupSpec) -> None:
    """Raises InvalidArgumentError if the mesh has more devices than MAX_WORLD_RANKS."""
    if spec.world_size > MAX_WORLD_RANKS:
        raise InvalidArgumentError(
            f"mesh_axes must multiply to at most {MAX_WORLD_RANKS} devices, got {spec.world_size}",
            argument="mesh",
        )


def board_layout(spec: GroupSpec, ranks: Iterable[int] | None = None) -> BoardLayout:
    """Returns the offsets of the parts of the board of one node.

    Args:
        spec: the group.
        ranks: world ranks of the node; None if all ranks are on it.

    Raises:
        InvalidArgumentError: as `check_world`, or a rank is not in the mesh.
    """
    check_world(spec)
    here = tuple(range(spec.world_size) if ranks is None else sorted({*ranks}))
    if here and not 0 <= here[0] <= here[-1] < spec.world_size:
        raise InvalidArgumentError(
            f"ranks must be in 0..{spec.world_size - 1}, got {here[0]} to {here[-1]}",
            argument="ranks",
        )
    # Ranks meet on the board if their windows are in host memory. A copy of a job's state has no
    # calls, and its ranks are the whole job's processes.
    calls = spec.transport != STATE
    meets = calls and not on_device(spec)
    num_domains = len(here) // spec.ranks_per_node if meets else 0
    at = _Cursor(align_up(ctypes.sizeof(BoardHeaderStruct), LINE_BYTES))
    tally = tally_layout(spec)
    domain = control_bytes(spec.ranks_per_node, spec.lanes) if meets else 0
    all_here = len(here) == spec.world_size
    return BoardLayout(
        spec=spec,
        ranks=here,
        # Devices map the pages of the header and of records of ranks and handles.
        ranks_offset=at.take(len(here) * ctypes.sizeof(RankRecordStruct)),
        handles_offset=at.take(MAX_HANDLES * ctypes.sizeof(HandleRecordStruct)),
        failures_offset=at.on_page().take(FAILURE_RECORDS * ctypes.sizeof(FailureRecordStruct)),
        seats_offset=at.take(align_up(spec.world_size * 4, PAGE_BYTES)),
        world_offset=at.take(control_bytes(spec.world_size, 0) if meets and all_here else 0),
        domains_offset=at.take(num_domains * domain),
        domain_bytes=domain,
        num_domains=num_domains,
        tally=tally,
        tallies_offset=at.take(len(here) * tally.tally_bytes if calls else 0),
        device_rows_offset=at.take(
            len(here) * MAX_HANDLES * ctypes.sizeof(DeviceRowsStruct) if on_device(spec) else 0
        ),
        board_bytes=at.offset,
    )


class _Cursor:
    """Hands out offsets, one part after the other."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def on_page(self) -> _Cursor:
        self.offset = align_up(self.offset, PAGE_BYTES)
        return self

    def take(self, num_bytes: int) -> int:
        """Returns the offset of a part; 0 for a part without bytes."""
        start, self.offset = self.offset, self.offset + num_bytes
        return start if num_bytes else 0


def board_bytes(spec: GroupSpec, ranks: Iterable[int] | None = None) -> int:
    """Returns the bytes of the board of one node; arguments as of `board_layout`."""
    return board_layout(spec, ranks).board_bytes


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


def format_board(buf: Any, where: BoardLayout, generation: int) -> None:
    """Zeroes a board and writes its header. Call only while no client maps the board.

    Args:
        buf: writable buffer (mmap or memoryview) of at least `where.board_bytes` bytes.
        where: the board's layout.
        generation: the group's positive generation, which a later poison names.

    Raises:
        InvalidArgumentError: `buf` is too small.
    """
    spec = where.spec
    view = memoryview(buf)
    if view.nbytes < where.board_bytes:
        raise InvalidArgumentError(
            f"buf must hold {where.board_bytes} bytes, got {view.nbytes}", argument="buf"
        )
    view.release()
    base = ctypes.addressof(ctypes.c_char.from_buffer(buf))
    ctypes.memset(base, 0, where.board_bytes)
    places = [
        (where.domains_offset + domain * where.domain_bytes, spec.ranks_per_node, spec.lanes)
        for domain in range(where.num_domains)
    ]
    if where.world_offset:
        places.append((where.world_offset, spec.world_size, 0))
    for offset, ranks, lanes in places:
        control = ControlStruct.from_buffer(buf, offset)
        control.ranks, control.lanes = ranks, lanes
    header = BoardHeaderStruct.from_buffer(buf)
    header.version = VERSION
    header.world_size = spec.world_size
    header.generation = generation
    header.poison_rank = -1
    header.ep_size = spec.ranks_per_node
    header.num_domains = where.num_domains
    header.lanes = spec.lanes
    header.max_handles = MAX_HANDLES
    header.meeting_slots = MEETING_SLOTS
    header.num_here = len(where.ranks)
    header.window_bytes = window_bytes(spec)
    header.board_bytes = where.board_bytes
    for name, value in vars(where).items():
        if name.endswith("_offset"):
            setattr(header, name, value)
    header.domain_bytes, header.tally_bytes = where.domain_bytes, where.tally.tally_bytes
    seats = (ctypes.c_uint32 * spec.world_size).from_buffer(buf, where.seats_offset)
    size = ctypes.sizeof(RankRecordStruct)
    for seat, rank in enumerate(where.ranks):
        seats[rank] = seat + 1
        record = RankRecordStruct.from_buffer(buf, where.ranks_offset + seat * size)
        record.waiting_for = record.lane = -1
    header.magic = MAGIC  # written last, so that readers that see it see the rest


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
    # Unchecked, because clients may have overwritten it.
    header = BoardHeaderStruct.from_buffer(buf)
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
    BoardHeaderStruct.from_buffer(buf).now_ns = now_ns


def from_struct(kind: type[_Record], raw: Any, **others: Any) -> _Record:
    """Makes a dataclass from a struct's fields of the same names, and from `others`."""
    fields: Any = kind
    names = (name for name in fields.__dataclass_fields__ if name not in others)
    return kind(**{name: getattr(raw, name) for name in names}, **others)


def read_header(buf: Any) -> BoardHeader:
    """Reads a board's header. Raises InvalidArgumentError if `buf` is not a formatted board."""
    header = BoardHeaderStruct.from_buffer(buf)
    if header.magic != MAGIC or header.version != VERSION:
        raise InvalidArgumentError(
            f"buf must hold a board of version {VERSION}, "
            f"got magic {header.magic:#x} version {header.version}",
            argument="buf",
        )
    reason, by = PoisonReason(header.poison_reason), poisoned_by(header)
    return from_struct(BoardHeader, header, poison_reason=reason, poison_by=by)


_RECORD_BYTES = ctypes.sizeof(RankRecordStruct)


@dataclasses.dataclass(frozen=True)
class Poison:
    """The poison of a generation: why its calls must end.

    Attributes:
        reason: the daemon's reason.
        rank: world rank of the process that ended or was fenced; -1 if there is none, or unknown.
        pid: this process's pid in its own pid namespace; 0 if it is on another node.
        by: the process that gave the order.
    """

    reason: PoisonReason
    rank: int
    pid: int
    by: By = NOBODY


def read_poison(board_fd: int, generation: int) -> Poison | None:
    """Reads a generation's poison; None if it is not poisoned."""
    header = _header_of(board_fd)
    if header.poison_generation < generation:
        return None
    reason, rank = PoisonReason(header.poison_reason), int(header.poison_rank)
    by = poisoned_by(header)
    if not 0 <= rank < header.world_size:
        return Poison(reason, -1, 0, by)
    (seat,) = _seats(board_fd, header, rank, 1)
    if not seat:
        return Poison(reason, rank, 0, by)
    offset = header.ranks_offset + (seat - 1) * _RECORD_BYTES
    record = RankRecordStruct.from_buffer_copy(os.pread(board_fd, _RECORD_BYTES, offset))
    return Poison(reason, rank, int(record.pid), by)


def left_ranks(board_fd: int) -> list[int]:
    """Returns world ranks of this node whose processes have closed the group."""
    header = _header_of(board_fd)
    records = os.pread(board_fd, header.num_here * _RECORD_BYTES, header.ranks_offset)
    return [
        rank
        for rank, seat in enumerate(_seats(board_fd, header, 0, header.world_size))
        if seat and RankRecordStruct.from_buffer_copy(records, (seat - 1) * _RECORD_BYTES).left
    ]


def _seats(board_fd: int, header: BoardHeaderStruct, first: int, count: int) -> Sequence[int]:
    """Reads the seats plus one of `count` world ranks from `first` on; 0 for other nodes' ranks."""
    seats = ctypes.c_uint32 * count
    at = header.seats_offset + first * ctypes.sizeof(ctypes.c_uint32)
    return tuple(seats.from_buffer_copy(os.pread(board_fd, ctypes.sizeof(seats), at)))


def _header_of(board_fd: int) -> BoardHeaderStruct:
    page = os.pread(board_fd, ctypes.sizeof(BoardHeaderStruct), 0)
    return BoardHeaderStruct.from_buffer_copy(page)
