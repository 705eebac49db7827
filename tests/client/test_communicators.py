"""A process makes its NCCL communicators: ids from a real daemon, libnccl without GPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from nccl_builds import FakeNccl, edge_library, fake_library
from nccl_ranks import SPEC, WAIT_S, Rank
from raw_client import make_spec

from ep_runtime import board, native, nccl
from ep_runtime.board_abi import RankRecordStruct
from ep_runtime.errors import EpRuntimeError, PeerLostError, RuntimeUnavailableError
from ep_runtime.native_abi import LayerStruct
from ep_runtime.v1 import types_pb2
from ep_runtime_client.groups import formed
from ep_runtime_client.nccl import communicators


def test_ranks_of_two_processes_join_with_ids_of_the_daemon(
    ranks: tuple[list[Rank], int], fake: FakeNccl
) -> None:
    both, generation = ranks
    for thread in [rank.join(generation) for rank in both]:
        thread.join(WAIT_S)
    assert [rank.error for rank in both] == [None, None]
    assert both[0].state() == ("2.28.9", "ready, 2 ranks")
    assert fake.count("inits") == 2


def test_a_process_that_ends_ends_the_others_wait_at_once(
    ranks: tuple[list[Rank], int], fake: FakeNccl
) -> None:
    (stays, goes), generation = ranks
    thread = stays.join(generation)
    while fake.count("inits") == 0:
        thread.join(0.01)
    started = time.monotonic()
    goes.client.goodbye()
    thread.join(WAIT_S)
    assert isinstance(stays.error, EpRuntimeError)
    assert time.monotonic() - started < 2.0
    assert fake.count("aborts") == 1


def test_an_init_that_times_out_is_told_to_the_daemon(ranks: tuple[list[Rank], int]) -> None:
    both, generation = ranks
    both[0].join(generation, budget_s=0.3).join(WAIT_S)
    assert "was not done within" in str(both[0].error)
    assert both[0].state()[1].startswith("none: rank 0: NCCL: init")


def _attach(both: list[Rank]) -> None:
    """Waits until the group is READY."""
    (listed,) = both[0].groups()
    with ThreadPoolExecutor() as pool:
        attached = [pool.submit(rank.client.attached, listed.group) for rank in both]
        for each in attached:
            each.result(WAIT_S)


def _watch(rank: Rank, generation: int, left: Callable[[], list[int]]) -> communicators.Watch:
    assert rank.made is not None
    ranks = communicators.ranks_of(SPEC, generation, (rank.rank,), (rank.rank,))

    def report(error: str) -> None:
        communicators.report(rank.control, ranks, "2.28.9", error)

    return communicators.Watch(rank.made, "g", left, report)


def test_an_error_of_nccl_breaks_the_group_at_the_daemon(
    ranks: tuple[list[Rank], int], fake: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicators, "TOLD_S", 0.1)
    both, generation = ranks
    for thread in [rank.join(generation) for rank in both]:
        thread.join(WAIT_S)
    _attach(both)
    watches = [_watch(rank, generation, list) for rank in both]
    assert both[0].state()[1] == "ready, 2 ranks"
    fake.set("async_error", 6)
    for watch in watches:
        watch.join()
    (listed,) = both[0].groups()
    assert listed.group.state == types_pb2.GROUP_STATE_BROKEN
    assert "remote process exited" in listed.nccl_state


def test_a_process_that_closes_in_good_order_ends_the_others_calls(
    ranks: tuple[list[Rank], int], fake: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicators, "LEFT_GRACE_S", 0.1)
    both, generation = ranks
    for thread in [rank.join(generation) for rank in both]:
        thread.join(WAIT_S)
    _attach(both)
    stays = both[0]
    gone: list[int] = []
    watch = _watch(stays, generation, lambda: gone)
    assert stays.made is not None
    assert stays.made.await_failure(0.0) == ""
    gone.append(1)
    assert "the process of rank 1 closed group 'g'" in str(stays.made.await_failure(WAIT_S))
    watch.join()
    # No process is lost, and nothing is broken.
    assert stays.groups()[0].group.state == types_pb2.GROUP_STATE_READY


def test_a_daemon_without_libnccl_is_the_error(
    fake: FakeNccl,
    daemon_process: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    directory = daemon_process().directory
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))
    rank = Rank(directory, 0)
    generation = int(rank.client.ready(SPEC).generation)
    rank.join(generation).join(WAIT_S)
    assert isinstance(rank.error, RuntimeUnavailableError)
    assert str(rank.error).startswith("the daemon makes no NCCL unique ids: no libnccl")
    assert not rank.control.lost  # the daemon answers; only its libnccl is missing
    rank.close()


class OpenGroup:
    """A fake group of the CUDA library that records its calls."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def add_layers(self, number: int, layers: Any) -> None:
        self.done.append(("layers", number, [layer.name for layer in layers]))

    def check_group(self, number: int) -> None:
        self.done.append(("check", number))

    def close_group(self, number: int) -> None:
        self.done.append(("close", number))


def test_a_group_with_communicators_ends_them_first(fake: FakeNccl) -> None:
    library: Any = OpenGroup()
    made = nccl.NcclLibrary(edge_library()).make_group(
        nccl.Ranks("g", 1, 2, (0, 1), (0, 1), WAIT_S), [b"\2" * 128]
    )
    made.init(WAIT_S)
    group = communicators.GroupWithNccl(library, 7, made)
    group.add_layers([LayerStruct(1, b"moe", 2, 1, 1, 1, 0)])
    assert group.check() is None
    group.end(PeerLostError("a process of group 'g' is gone"))
    assert fake.count("aborts") == 2
    text = group.check()
    assert text is not None
    assert "PeerLostError: a process of group 'g' is gone" in text
    group.close()
    assert library.done == [
        ("layers", 7, [b"moe"]),
        *[("check", 7)] * 2,
        ("close", 7),
    ]
    native.OpenGroup(library, 7).end(PeerLostError("it has no communicators"))
    assert isinstance(PeerLostError("x"), EpRuntimeError)


def test_a_board_names_the_ranks_that_left() -> None:
    where = board.board_layout(make_spec(ranks=4, transport="memfd"), [1, 3])
    fd = os.memfd_create("board")
    os.ftruncate(fd, where.board_bytes)
    memory = formed.Memory([(types_pb2.WindowDescriptor(world_rank=-1), fd)])
    with mmap.mmap(fd, 0) as page:
        board.format_board(memoryview(page), where, 7)
        assert memory.left() == []
        at = where.ranks_offset + ctypes.sizeof(RankRecordStruct)
        page[at + RankRecordStruct.left.offset] = 1
        assert memory.left() == [3]
        page[at + RankRecordStruct.pid.offset] = 9
        for rank, pid in ((2, 0), (3, 9)):  # on another node, and on this one
            board.poison(page, 6 + rank, board.PoisonReason.PEER_LOST, rank)
            why = memory.poison(7)
            assert why is not None
            assert (why.rank, why.pid) == (rank, pid)
    memory.close()
    assert memory.left() == []


def test_no_descriptor_is_closed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives events reads the board while the group is closed."""
    fd = os.memfd_create("board")
    memory = formed.Memory([(types_pb2.WindowDescriptor(world_rank=-1), fd)])
    closer = threading.Thread(target=memory.close)

    def read(board_fd: int, generation: int) -> None:
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        os.fstat(board_fd)

    monkeypatch.setattr(formed.board, "read_poison", read)
    assert memory.poison(7) is None
    closer.join(10)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert memory.poison(7) is None


def test_lent_descriptors_outlive_the_group() -> None:
    fd = os.memfd_create("window")
    memory = formed.Memory([(types_pb2.WindowDescriptor(world_rank=3), fd)])
    with memory.lent([-1, 3]) as held:
        memory.close()
        ((item, lent),) = held
        assert item.world_rank == 3
        assert os.fstat(lent).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lent)
