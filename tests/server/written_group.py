"""Groups whose boards tests write as processes would."""

from __future__ import annotations

import ctypes
import mmap
import os

from file_driver import UUIDS

from ep_runtime import board, board_abi, device_layout


class Group:
    """A formed group of a raw client with registered layers; its ranks are on two GPUs."""

    def __init__(self, client, spec, *, layers=(), stacks=()) -> None:
        self.spec = spec
        gpus = [UUIDS[rank % 2] for rank in range(spec.world_size)]
        made = client.create(spec, uuids=gpus if device_layout.on_device(spec) else ())
        self.client, self.made = client, made.group
        (item, fd), *rest = client.fetch(self.made)
        self.map = mmap.mmap(fd, item.bytes)
        for held in [fd, *(fd for _, fd in rest)]:
            os.close(held)
        client.attached(self.made)
        client.register(self.made, layers, stacks)
        self._where = board.board_layout(spec)

    def _write(self, kind, offset: int, fields: dict[str, int]) -> None:
        record = kind.from_buffer(self.map, offset)
        for name, value in fields.items():
            setattr(record, name, value)

    def handle(self, index: int, **fields: int) -> None:
        offset = self._where.handles_offset + index * ctypes.sizeof(board_abi.HandleRecordStruct)
        self._write(board_abi.HandleRecordStruct, offset, fields)

    def rank(self, rank: int, **fields: int) -> None:
        offset = self._where.ranks_offset + rank * ctypes.sizeof(board_abi.RankRecordStruct)
        self._write(board_abi.RankRecordStruct, offset, fields)

    def rows(self, rank: int, index: int, rows: int, dropped_rows: int = 0) -> None:
        assert self._where.device_rows_offset
        size = ctypes.sizeof(board_abi.DeviceRowsStruct)
        offset = self._where.device_rows_offset + (rank * board_abi.MAX_HANDLES + index) * size
        self._write(
            board_abi.DeviceRowsStruct, offset, {"rows": rows, "dropped_rows": dropped_rows}
        )

    def close(self) -> None:
        self.map.close()
        self.client.close_group(self.made)
