"""A process's way to its NCCL communicators: ids of a real daemon's, a libnccl without GPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import daemon_process  # noqa: F401 - fixtures are found by name
from nccl_builds import FakeNccl, edge_library, fake_library
from raw_client import Client, make_spec

from ep_runtime import board, native, nccl
from ep_runtime.board_abi import RankRecordStruct
from ep_runtime.errors import EpRuntimeError, PeerLostError, RuntimeUnavailableError
from ep_runtime.v1 import admin_service_pb2, types_pb2
from ep_runtime_client import communicators, forming, transport

SPEC = make_spec(transport="xla")
WAIT_S = 20.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))
    edge_library()  # compiled before any clock runs
    made = FakeNccl()
    made.reset()
    yield made
    made.reset()


class Rank:
    """One process's client of the daemon, and what became of its communicators."""

    def __init__(self, directory: Any, rank: int) -> None:
        self.rank = rank
        self.client = Client(directory)
        self.control = transport.ControlChannel(directory, self.client.token)
        self.made: nccl.NcclGroup | None = None
        self.error: EpRuntimeError | None = None

    def join(self, generation: int, *, budget_s: float = WAIT_S) -> threading.Thread:
        """Makes the communicators on a thread of its own."""
        ranks = communicators.ranks_of(SPEC, generation, (self.rank,), (self.rank,))

        def work() -> None:
            library = nccl.NcclLibrary(edge_library())
            try:
                self.made = communicators.make(self.control, library, ranks, budget_s)
            except EpRuntimeError as error:
                self.error = error

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def groups(self) -> list[Any]:
        request = admin_service_pb2.ListGroupsRequest()
        return list(self.client.call(self.client.admin.ListGroups, request).groups)

    def state(self) -> tuple[str, str]:
        (listed,) = self.groups()
        return listed.nccl_version, listed.nccl_state

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
        self.control.close()
        self.client.close()


@pytest.fixture
def ranks(fake: FakeNccl, daemon_process: Any) -> Iterator[tuple[list[Rank], int]]:  # noqa: F811
    """Two processes' clients in one group, and its generation."""
    directory = daemon_process().directory
    made = [Rank(directory, 0), Rank(directory, 1)]
    groups: list[Any] = [None, None]

    def create(rank: int) -> None:
        groups[rank] = made[rank].client.create(SPEC, [rank]).group

    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    yield made, int(groups[0].generation)
    for rank in made:
        rank.close()


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
    """Until the group is READY."""
    (listed,) = both[0].groups()
    threads = [threading.Thread(target=rank.client.attached, args=(listed.group,)) for rank in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


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
    # Nobody is lost, and nothing is broken.
    assert stays.groups()[0].group.state == types_pb2.GROUP_STATE_READY


def test_a_daemon_without_libnccl_is_the_error_and_optional_groups_go_on(
    fake: FakeNccl,
    daemon_process: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    directory = daemon_process().directory
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))
    rank = Rank(directory, 0)
    generation = int(rank.client.ready(SPEC).generation)
    rank.join(generation).join(WAIT_S)
    assert isinstance(rank.error, RuntimeUnavailableError)
    assert str(rank.error).startswith("the daemon makes no NCCL unique ids: no libnccl")
    assert not rank.control.lost  # the daemon is there; only its libnccl is not

    def work() -> nccl.NcclGroup:
        assert rank.error is not None
        raise rank.error

    assert communicators.optional("g", work) is None
    assert "goes on without NCCL" in caplog.text
    rank.close()


class OpenGroup:
    """A CUDA library's group that says what was done with it."""

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
    group.add_layers([native.NativeLayer(1, "moe", 2, 1, 1, 1, 0)])
    assert group.check() is None
    communicators.end_calls(group, "g", "a process is gone")
    assert fake.count("aborts") == 2
    beside = communicators.GroupWithNccl(library, 8, made, carries_rows=False)
    assert beside.check() is None  # no row travels over them
    text = group.check()
    assert text is not None
    assert "PeerLostError: group 'g' is gone: a process is gone" in text
    group.close()
    assert library.done == [
        ("layers", 7, ["moe"]),
        *(("check", n) for n in (7, 8, 7)),
        ("close", 7),
    ]
    communicators.end_calls(native.OpenGroup(library, 7), "g", "no communicators")
    communicators.end_calls(None, "g", "no windows")
    assert isinstance(PeerLostError("x"), EpRuntimeError)


def test_a_board_names_the_ranks_that_left() -> None:
    spec = make_spec(transport="memfd")
    fd = os.memfd_create("board")
    os.ftruncate(fd, board.board_bytes(spec))
    memory = forming.Memory([(types_pb2.WindowDescriptor(world_rank=-1), fd)])
    with mmap.mmap(fd, 0) as page:
        board.format_board(memoryview(page), spec, 7)
        assert memory.left() == []
        at = board.board_layout(spec).ranks_offset + ctypes.sizeof(RankRecordStruct)
        page[at + RankRecordStruct.left.offset] = 1
        assert memory.left() == [1]
    memory.close()
    assert memory.left() == []
