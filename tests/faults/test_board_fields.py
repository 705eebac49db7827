"""A client may write anything into any field of its board: the daemon continues, and logs it."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import mmap
import os
import random
import signal

import pytest
from raw_client import make_spec

from ep_runtime import board, board_abi, board_records, layer_specs
from ep_runtime_server.base.clock import SystemClock
from ep_runtime_server.groups import lateness
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import Owner, WindowSet
from ep_runtime_server.rpc import views


def fields_of_every_part(where):
    """(byte offset, bytes, name) of every field of a board, arrays as one field each."""
    parts = [
        (0, board_abi.BoardHeaderStruct),
        (where.ranks_offset, board_abi.RankRecordStruct),
        (where.ranks_offset + 128, board_abi.RankRecordStruct),
        (where.handles_offset, board_abi.HandleRecordStruct),
        (where.failures_offset, board_abi.FailureRecordStruct),
    ]
    for control in filter(None, (where.world_offset, where.domains_offset)):
        parts.append((control, board_abi.ControlStruct))
        parts.append((control + 64, board_abi.LaneStruct))
    tally = where.tally
    parts += [
        (where.tallies_offset, board_abi.OpRecordStruct),
        (where.tallies_offset + tally.tally_bytes, board_abi.OpRecordStruct),
        (where.tallies_offset + tally.peers_offset, board_abi.PeerRecordStruct),
        (where.tallies_offset + tally.loads_offset, board_abi.LoadRecordStruct),
    ]
    if where.device_rows_offset:
        parts.append((where.device_rows_offset, board_abi.DeviceRowsStruct))
    for seat in (0, 1):
        yield where.seats_offset + 4 * seat, 4, f"seat of rank {seat}"
    for offset, struct in parts:
        for name, kind, *_ in struct._fields_:
            at = offset + getattr(struct, name).offset
            yield at, ctypes.sizeof(kind), f"{struct.__name__}.{name}@{offset}"


def extreme_values(size: int, numbers: random.Random):
    """Draws little-endian values around the edges of a field, and one at random."""
    bits = 8 * size
    edges = [0, 1, (1 << bits) - 1, (1 << bits) - 64, 1 << (bits - 1), (1 << bits - 1) - 1]
    for value in (*edges, numbers.getrandbits(bits)):
        yield (value % (1 << bits)).to_bytes(size, "little")


def look(daemon) -> None:
    """Calls everything that reads a board; each call must answer."""
    assert len(daemon.ask("ListHandles").handles) == 1
    assert len(daemon.ask("ListRanks").ranks) == 2
    assert len(daemon.ask("ListTallies").ranks) == 2
    assert len(daemon.ask("ListGroups").groups) == 1
    daemon.status()


def test_no_field_of_a_board_hurts_the_daemon(daemon_process):
    daemon = daemon_process()
    client = daemon.client()
    spec = make_spec()
    group = client.create(spec).group
    client.register(group, [layer_specs.LayerSpec("a", top_k=1)])
    (item, fd), *rest = client.fetch(group)
    client.attached(group)
    numbers = random.Random(1)
    written = 0
    with mmap.mmap(fd, item.bytes) as mapped:
        formatted = mapped[:]
        for at, size, name in fields_of_every_part(board.board_layout(spec)):
            for value in extreme_values(size, numbers):
                mapped[at : at + size] = value
                try:
                    look(daemon)
                except Exception as error:
                    raise AssertionError(f"{name} = {value.hex()}") from error
                written += 1
            mapped[at : at + size] = formatted[at : at + size]
    for held in (fd, *(fd for _, fd in rest)):
        os.close(held)
    assert written > 400
    client.goodbye()
    daemon.popen.send_signal(signal.SIGTERM)  # the reaper answers it
    code, text = daemon.ended()
    assert code == 0
    assert "traceback" not in text, text[-3000:]


@pytest.fixture
def group_of_two():
    """(group with a layer and a board that its clients map, the board)."""
    spec = make_spec()
    where = board.board_layout(spec)
    mapped = mmap.mmap(-1, where.board_bytes)
    board.format_board(mapped, where, 1)
    group = GroupRecord(Owner(7, "job", "moe"), spec, 1)
    group.windows = WindowSet(group.owner, where, 1, 0.0)
    group.windows.board = mapped
    asyncio.run(group.layers.register([layer_specs.LayerSpec("a", top_k=1)], []))
    return group, mapped


def read_all(group: GroupRecord, clock: SystemClock) -> None:
    """Reads everything that the daemon reads from a board: lists, late ranks, and poison."""
    now_s = clock.monotonic_s()
    views.group_info(group, clock, ("", ""), lambda device: None).SerializeToString()
    for handle in views.handles([group], ""):
        views.handle_info(handle, clock).SerializeToString()
    for rank in views.ranks([group]):
        views.rank_info(rank, clock).SerializeToString()
        views.rank_tally(rank, clock).SerializeToString()
    layout = group.windows.layout
    board_records.read_extra_chunks(group.windows.board, layout, group.layers.num_handles)
    for late in lateness.late_in(group, now_s):
        views.late_rank(late).SerializeToString()
    board.tell_time(group.windows.board, int(now_s * 1e9))
    group.windows.poison(board_abi.PoisonReason.PEER_LOST, 1)


@pytest.mark.doses(ci=3000, full=1_000_000)
def test_any_values_in_any_fields_are_read(group_of_two, dose):
    """Changes several fields at a time, so that wrong values of one meet wrong
    values of another.
    """
    group, mapped = group_of_two
    clock, numbers = SystemClock(), random.Random(dose)
    fields = list(fields_of_every_part(group.windows.layout))
    formatted = mapped[:]
    for number in range(dose):
        if number % 64 == 0:
            mapped[:] = formatted
        at, size, name = numbers.choice(fields)
        value = numbers.choice(list(extreme_values(size, numbers)))
        mapped[at : at + size] = value
        try:
            read_all(group, clock)
        except Exception as error:
            raise AssertionError(f"input {number}: {name} = {value.hex()}") from error


def test_any_values_of_ranks_on_devices_are_read():
    where = board.board_layout(dataclasses.replace(make_spec(), transport="nvlink"))
    mapped = mmap.mmap(-1, where.board_bytes)
    numbers = random.Random(3)
    fields = list(fields_of_every_part(where))
    for _ in range(2000):
        at, size, _ = numbers.choice(fields)
        mapped[at : at + size] = numbers.choice(list(extreme_values(size, numbers)))
        board_records.read_ranks(mapped, where)
        for record in board_records.read_handles(mapped, where, [0, 1, board_abi.MAX_HANDLES - 1]):
            assert record is None or max(record.rows, record.dropped_rows) < 1 << 64
