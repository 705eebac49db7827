"""A client may write anything into every field of its board: the daemon goes on, and says so."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal

import pytest
from raw_client import make_spec

from ep_runtime import board, board_abi, specs


def fields_of_every_part(spec):
    """(byte offset, bytes, name) of every field of a board, arrays as one field each."""
    where = board.board_layout(spec)
    parts = [
        (0, board_abi.BoardHeaderStruct),
        (where.ranks_offset, board_abi.RankRecordStruct),
        (where.ranks_offset + 128, board_abi.RankRecordStruct),
        (where.handles_offset, board_abi.HandleRecordStruct),
        (where.failures_offset, board_abi.FailureRecordStruct),
        (where.world_offset, board_abi.ControlStruct),
        (where.domains_offset, board_abi.ControlStruct),
        (where.domains_offset + 64, board_abi.LaneStruct),
    ]
    if where.device_rows_offset:
        parts.append((where.device_rows_offset, board_abi.DeviceRowsStruct))
    for offset, struct in parts:
        for name, kind, *_ in struct._fields_:
            at = offset + getattr(struct, name).offset
            yield at, ctypes.sizeof(kind), f"{struct.__name__}.{name}@{offset}"


def extreme_values(size: int, numbers: random.Random):
    """Little-endian values around every edge of a field, and two at random."""
    bits = 8 * size
    edges = [0, 1, 2, 3, 7, (1 << bits) - 1, (1 << bits) - 64, 1 << (bits - 1), (1 << bits - 1) - 1]
    for value in (*edges, numbers.getrandbits(bits), numbers.getrandbits(bits)):
        yield (value % (1 << bits)).to_bytes(size, "little")


def look(daemon) -> None:
    """Everything that reads a board; each answers."""
    assert len(daemon.ask("ListHandles").handles) == 1
    assert len(daemon.ask("ListRanks").ranks) == 2
    assert len(daemon.ask("ListGroups").groups) == 1
    daemon.status()


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(9))])
def test_no_field_of_a_board_hurts_the_daemon(daemon_process, seed):
    daemon = daemon_process()
    client = daemon.client()
    spec = make_spec()
    group = client.create(spec).group
    client.register(group, [specs.LayerSpec("a", top_k=1)])
    (item, fd), *rest = client.fetch(group)
    client.attached(group)
    numbers = random.Random(seed)
    inputs = 0
    with mmap.mmap(fd, item.bytes) as mapped:
        formatted = mapped[:]
        for at, size, name in fields_of_every_part(spec):
            for value in extreme_values(size, numbers):
                mapped[at : at + size] = value
                try:
                    look(daemon)
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {name} = {value.hex()}") from error
                inputs += 1
            mapped[at : at + size] = formatted[at : at + size]
    for held in (fd, *(fd for _, fd in rest)):
        os.close(held)
    assert inputs > 500
    client.goodbye()
    daemon.popen.send_signal(signal.SIGTERM)  # which the reaper answers
    code, text = daemon.ended()
    assert code == 0
    assert "traceback" not in text, text[-3000:]
