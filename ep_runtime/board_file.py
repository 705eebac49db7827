"""Which ranks have closed a group, read off its board without mapping it."""

from __future__ import annotations

import ctypes
import os

from ep_runtime.board_abi import BoardHeaderStruct, RankRecordStruct

_RECORD_BYTES = ctypes.sizeof(RankRecordStruct)


def left_ranks(board_fd: int) -> list[int]:
    """World ranks of this node whose process closed the group, after its last call."""
    page = os.pread(board_fd, ctypes.sizeof(BoardHeaderStruct), 0)
    header = BoardHeaderStruct.from_buffer_copy(page)
    records = os.pread(board_fd, header.world_size * _RECORD_BYTES, header.ranks_offset)
    return [
        rank
        for rank in range(header.world_size)
        if RankRecordStruct.from_buffer_copy(records, rank * _RECORD_BYTES).left
    ]
