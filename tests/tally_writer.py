"""Writes the tallies of a board as ranks would."""

from __future__ import annotations

import ctypes
import mmap

from ep_runtime import board
from ep_runtime.board_abi import LoadRecordStruct, OpCode, OpRecordStruct, PeerRecordStruct
from ep_runtime.specs import GroupSpec


class Tally:
    """A client's view of one rank's tally, to which it adds the times of its calls."""

    def __init__(self, mapped: mmap.mmap, spec: GroupSpec, rank: int) -> None:
        self._map, self._spec = mapped, spec
        where = board.board_layout(spec)
        self._layout = where.tally
        self._start = where.tallies_offset + rank * self._layout.tally_bytes

    def op(self, op: OpCode) -> OpRecordStruct:
        at = self._start + op * ctypes.sizeof(OpRecordStruct)
        return OpRecordStruct.from_buffer(self._map, at)

    def peer(self, op: OpCode, peer: int) -> PeerRecordStruct:
        place = op * self._spec.ranks_per_node + peer
        at = self._start + self._layout.peers_offset + place * ctypes.sizeof(PeerRecordStruct)
        return PeerRecordStruct.from_buffer(self._map, at)

    def load(self, index: int) -> tuple[LoadRecordStruct, ctypes.Array]:
        at = self._start + self._layout.loads_offset + index * self._layout.load_bytes
        rows = ctypes.c_uint64 * self._spec.experts_per_rank
        return (
            LoadRecordStruct.from_buffer(self._map, at),
            rows.from_buffer(self._map, at + ctypes.sizeof(LoadRecordStruct)),
        )
