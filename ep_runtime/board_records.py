"""Reads records of ranks and handles, and tallies of calls, from a group's board.

Any client of the group can write any byte of the board, including the header and the table of
seats. So a reader finds records with its own layout, and ignores malformed records. Tallies are
sums since the board was formatted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from ep_runtime.board import BoardLayout, from_struct
from ep_runtime.board_abi import (
    BUCKET_BITS,
    MAX_HANDLES,
    MAX_LOADS,
    TIME_BUCKETS,
    BoardHeaderStruct,
    DeviceRowsStruct,
    HandleRecordStruct,
    HandleState,
    LoadRecordStruct,
    OpCode,
    OpRecordStruct,
    PeerRecordStruct,
    PoisonReason,
    RankRecordStruct,
    RankState,
)
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec

_Number = TypeVar("_Number", bound=enum.IntEnum)
_MOST = (1 << 64) - 1  # limit of sums, because clients may write any numbers


@dataclasses.dataclass(frozen=True)
class HandleRecord:
    """One handle's record; `calls`, `rows` and `dropped_rows` are sums over ranks.

    `rounds` counts the parts of block calls beyond one per call, in the EP group with the most.
    """

    state: HandleState
    last_op: OpCode
    epoch: int
    lane: int
    calls: int
    rows: int
    dropped_rows: int
    updated_ns: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """One world rank's record. Times are CLOCK_MONOTONIC in ns.

    `waiting_for` is a world rank or -1. `pid` is the process's pid in its own pid namespace; 0
    before the process has mapped the board.
    """

    state: RankState
    op: OpCode
    layer_id: int
    handle: int
    epoch: int
    lane: int
    waiting_for: int
    since_ns: int
    progress_ns: int
    calls: int
    rows: int
    dropped_rows: int
    open_calls: int
    pid: int = 0


def _known(kind: type[_Number], number: int) -> _Number | None:
    try:
        return kind(number)
    except ValueError:
        return None


def read_poison(buf: Any) -> tuple[int, PoisonReason | None]:
    """Reads (latest poisoned generation or 0, reason); the reason is None if unknown."""
    header = BoardHeaderStruct.from_buffer(buf)
    return header.poison_generation, _known(PoisonReason, header.poison_reason)


def read_handles(buf: Any, where: BoardLayout, indices: Iterable[int]) -> list[HandleRecord | None]:
    """Reads records of handles by index; None for a malformed record.

    Raises:
        InvalidArgumentError: an index is out of range.
    """
    size = ctypes.sizeof(HandleRecordStruct)
    records: list[HandleRecord | None] = []
    for index in indices:
        if not 0 <= index < MAX_HANDLES:
            raise InvalidArgumentError(
                f"handle index must be in [0, {MAX_HANDLES}), got {index}", argument="indices"
            )
        raw = HandleRecordStruct.from_buffer_copy(buf, where.handles_offset + index * size)
        state, last_op = _known(HandleState, raw.state), _known(OpCode, raw.last_op)
        if state is None or last_op is None:
            records.append(None)
            continue
        rows, dropped_rows = 0, 0
        if where.device_rows_offset:
            rows, dropped_rows = map(sum, _device_rows(buf, where, index))
        records.append(
            from_struct(
                HandleRecord,
                raw,
                state=state,
                last_op=last_op,
                lane=raw.lane if raw.calls else -1,
                rows=min(_MOST, raw.rows + rows),
                dropped_rows=min(_MOST, raw.dropped_rows + dropped_rows),
            )
        )
    return records


def read_extra_chunks(buf: Any, where: BoardLayout, num_handles: int) -> dict[int, int]:
    """Returns nonzero numbers of extra chunks by index, for the first `num_handles` handles."""
    size = ctypes.sizeof(HandleRecordStruct) // 8
    first = (where.handles_offset + HandleRecordStruct.rounds.offset) // 8
    with memoryview(buf) as view, view.cast("Q") as words:
        counts = words[first : first + num_handles * size : size].tolist()
    return {index: count for index, count in enumerate(counts) if count}


def _device_rows(buf: Any, where: BoardLayout, index: int) -> tuple[list[int], list[int]]:
    """Reads (rows, dropped rows) of a handle by seat, as counted by ranks on devices."""
    size = ctypes.sizeof(DeviceRowsStruct)
    first, stride = where.device_rows_offset + index * size, MAX_HANDLES * size
    last = first + len(where.ranks) * stride
    with memoryview(buf) as view, view.cast("Q") as words:
        step = stride // 8
        return (
            words[first // 8 : last // 8 : step].tolist(),
            words[first // 8 + 1 : last // 8 : step].tolist(),
        )


def read_device_rows(
    buf: Any, where: BoardLayout, indices: Iterable[int]
) -> dict[int, tuple[int, int]] | None:
    """Returns (rows, dropped rows) by world rank of this node, summed over the handles.

    None if windows are in host memory, because such ranks add to the handle's own record.
    """
    if not where.device_rows_offset:
        return None
    counted = [_device_rows(buf, where, index) for index in indices]
    rows = map(sum, zip(*(rows for rows, _ in counted), strict=True))
    dropped = map(sum, zip(*(dropped for _, dropped in counted), strict=True))
    return {
        rank: (min(_MOST, here), min(_MOST, lost))
        for rank, here, lost in zip(where.ranks, rows, dropped, strict=False)
    }


def read_failures(buf: Any) -> int:
    """Reads the number of failed runs that the group's processes reported to each other."""
    return int(BoardHeaderStruct.from_buffer(buf).failures)


def _stable_copy(buf: Any, offset: int) -> RankRecordStruct:
    """Copies a rank's record while it is not being written; gives up after some tries."""
    live = RankRecordStruct.from_buffer(buf, offset)
    copy = RankRecordStruct.from_buffer_copy(live)
    for _ in range(16):
        if copy.sequence % 2 == 0 and live.sequence == copy.sequence:
            break
        copy = RankRecordStruct.from_buffer_copy(live)
    return copy


def read_ranks(
    buf: Any, where: BoardLayout, ranks: Iterable[int] | None = None
) -> list[RankRecord | None]:
    """Reads records of world ranks, by default all of this node.

    None for a malformed record, and for a rank of another node.
    """
    size = ctypes.sizeof(RankRecordStruct)
    records: list[RankRecord | None] = []
    for rank in where.ranks if ranks is None else ranks:
        seat = where.seat(rank)
        if seat is None:
            records.append(None)
            continue
        raw = _stable_copy(buf, where.ranks_offset + seat * size)
        state, op = _known(RankState, raw.state), _known(OpCode, raw.op)
        if state is None or op is None:
            records.append(None)
            continue
        records.append(from_struct(RankRecord, raw, state=state, op=op))
    return records


_LOAD_WORDS = ctypes.sizeof(LoadRecordStruct) // 8
# Bucket b counts calls shorter than BUCKET_BOUNDS_S[b]; the last has no bound.
BUCKET_BOUNDS_S = tuple((1 << BUCKET_BITS + bucket) / 1e9 for bucket in range(TIME_BUCKETS - 1))


@dataclasses.dataclass(frozen=True)
class PeerTally:
    """One peer in a rank's calls of one op: how late it arrived, and how long the rank waited."""

    world_rank: int
    arrival_ns: int
    wait_ns: int


@dataclasses.dataclass(frozen=True)
class OpTally:
    """One rank's calls of one op.

    `times` and `waits` count calls by bucket. `peers` are all ranks that share windows with this
    rank, including itself.
    """

    calls: int
    time_ns: int
    wait_ns: int
    times: tuple[int, ...]
    waits: tuple[int, ...]
    peers: tuple[PeerTally, ...]


@dataclasses.dataclass(frozen=True)
class LoadTally:
    """One rank's calls on some handles: the tokens it sent, and rows per local expert [L]."""

    calls: int
    time_ns: int
    wait_ns: int
    tokens: int
    rows: tuple[int, ...]


def _start(where: BoardLayout, rank: int) -> int | None:
    """Returns the offset of a world rank's tally; None if the board has none."""
    seat = where.seat(rank)
    if seat is None or not where.tallies_offset:
        return None
    return where.tallies_offset + seat * where.tally.tally_bytes


def read_ops(buf: Any, where: BoardLayout, rank: int) -> dict[OpCode, OpTally]:
    """Reads a world rank's tallies by op, for ops that it has called."""
    start, size = _start(where, rank), ctypes.sizeof(OpRecordStruct)
    if start is None:
        return {}
    found = {}
    for op in OpCode:
        raw = OpRecordStruct.from_buffer_copy(buf, start + op * size)
        if not raw.calls:
            continue
        times, waits = tuple(raw.times), tuple(raw.waits)
        peers = _read_peers(buf, where.spec, rank, start + where.tally.peers_offset, op)
        found[op] = from_struct(OpTally, raw, times=times, waits=waits, peers=peers)
    return found


def _read_peers(
    buf: Any, spec: GroupSpec, rank: int, offset: int, op: OpCode
) -> tuple[PeerTally, ...]:
    peers = spec.ranks_per_node
    words = _words(buf, offset + op * peers * ctypes.sizeof(PeerRecordStruct), 2 * peers)
    lowest = rank - rank % peers
    return tuple(PeerTally(lowest + i, words[2 * i], words[2 * i + 1]) for i in range(peers))


def _words(buf: Any, offset: int, count: int) -> list[int]:
    with memoryview(buf) as view, view.cast("Q") as words:
        return words[offset // 8 : offset // 8 + count].tolist()


def read_load(buf: Any, where: BoardLayout, rank: int, indices: Iterable[int]) -> LoadTally | None:
    """Sums up a world rank's calls on some handles; returns None if there were none.

    Ignores handles from MAX_LOADS on, whose loads the board does not have.
    """
    start, tally = _start(where, rank), where.tally
    if start is None:
        return None
    first, count = start + tally.loads_offset, _LOAD_WORDS + where.spec.experts_per_rank
    total: Sequence[int] = ()
    for index in indices:
        if index >= MAX_LOADS:
            continue
        words = _words(buf, first + index * tally.load_bytes, count)
        total = [min(_MOST, a + b) for a, b in zip(total, words, strict=True)] if total else words
    if not any(total):
        return None
    calls, time_ns, wait_ns, tokens, *rows = total
    return LoadTally(calls, time_ns, wait_ns, tokens, tuple(rows))


def first_expert(spec: GroupSpec, rank: int) -> int:
    """Returns the index of a world rank's first expert, which its other experts follow."""
    return rank % spec.ep_size * spec.experts_per_rank
