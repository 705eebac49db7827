"""Reads a board from its descriptor without mapping it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Sequence

from ep_runtime.board import NOBODY, By, PoisonReason, poisoned_by
from ep_runtime.board_abi import BoardHeaderStruct, RankRecordStruct

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
    header = _header(board_fd)
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
    header = _header(board_fd)
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


def _header(board_fd: int) -> BoardHeaderStruct:
    page = os.pread(board_fd, ctypes.sizeof(BoardHeaderStruct), 0)
    return BoardHeaderStruct.from_buffer_copy(page)
