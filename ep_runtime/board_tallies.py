"""Reads times, waits and loads of ranks' calls from a group's board.

Tallies are sums since the board was formatted. As in `board_records.py`, the reader's own layout
gives their offsets. Clients may write any numbers, so sums are limited to 64 bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ep_runtime.board import BoardLayout
from ep_runtime.board_abi import (
    BUCKET_BITS,
    MAX_LOADS,
    TIME_BUCKETS,
    LoadRecordStruct,
    OpCode,
    OpRecordStruct,
    PeerRecordStruct,
)
from ep_runtime.specs import GroupSpec

_MOST = (1 << 64) - 1
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
        found[op] = OpTally(
            calls=raw.calls,
            time_ns=raw.time_ns,
            wait_ns=raw.wait_ns,
            times=tuple(raw.times),
            waits=tuple(raw.waits),
            peers=_read_peers(buf, where.spec, rank, start + where.tally.peers_offset, op),
        )
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
