"""Communicators of groups with windows: made in the background, shown, ended with their group."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from child_programs import run_python
from daemon_fixtures import start_daemon, wait_until
from nccl_builds import FakeNccl, edge_library, fake_library
from nccl_ranks import SPEC, WAIT_S, Rank

import ep_runtime as ep
from ep_runtime import nccl
from ep_runtime.errors import (
    EpRuntimeError,
    PeerLostError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.groups import forming
from ep_runtime_client.nccl import beside, communicators

Ranks = tuple[list[Rank], int]
AT_ONCE_S = 2.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "IDS_AFTER_S", 0.0)
    monkeypatch.setattr(beside, "JOIN_AFTER_S", 0.05)
    monkeypatch.setattr(communicators, "TOLD_S", 0.1)
    monkeypatch.setattr(nccl, "library", lambda: nccl.NcclLibrary(edge_library()))


def of(rank: Rank, generation: int) -> beside.Beside:
    wanted = communicators.ranks_of(SPEC, generation, (rank.rank,), (rank.rank,))
    return beside.Beside(lambda work: work(rank.control), wanted)


@pytest.fixture
def made(ranks: Ranks) -> Iterator[list[beside.Beside]]:
    """Starts making the communicators of both processes."""
    both, generation = ranks
    found = [of(rank, generation) for rank in both]
    yield found
    for one in found:
        one.close()


def joining(fake: FakeNccl) -> None:
    wait_until(lambda: fake.count("inits") == 2, "both join")


def test_they_get_ready_with_one_channel_and_no_call(
    ranks: Ranks,
    made: list[beside.Beside],
    fake: FakeNccl,
) -> None:
    tried = ctypes.CDLL(str(edge_library())).TestTried
    so_far = tried()
    groups = [one.await_ready(WAIT_S) for one in made]
    wait_until(lambda: ranks[0][0].state() == ("2.28.9", "ready, 2 ranks"), "the listing says so")
    assert fake.count("max_ctas") == 1
    assert tried() == so_far  # nothing ran on a GPU
    assert summed(groups) == []
    fake.set("wrong_sum", 1)
    assert "an all-reduce gave 4" in str(summed(groups, 1.0))  # the other process may wait in vain


def summed(groups: list[nccl.NcclGroup], budget_s: float = WAIT_S) -> list[EpRuntimeError]:
    def work(group: nccl.NcclGroup) -> EpRuntimeError | None:
        try:
            group.try_sum(budget_s)
        except EpRuntimeError as error:
            return error
        return None

    with ThreadPoolExecutor() as pool:
        return [error for error in pool.map(work, groups, timeout=WAIT_S) if error]


def test_a_close_that_comes_first_leaves_nothing_to_join(
    ranks: Ranks,
    fake: FakeNccl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "IDS_AFTER_S", WAIT_S)
    both, generation = ranks
    one = of(both[0], generation)
    started = time.monotonic()
    one.close()
    with pytest.raises(StaleHandleError, match="was closed"):
        one.await_ready(WAIT_S)
    assert time.monotonic() - started < AT_ONCE_S
    assert fake.count("inits") == 0
    assert both[0].state() == ("", "")


@pytest.mark.parametrize("how", ["close", "stop_making"])
def test_an_end_amid_the_join_is_quick_and_no_failure(
    ranks: Ranks,
    fake: FakeNccl,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    fake.set("never_ready", 1)
    both, generation = ranks
    made = [of(rank, generation) for rank in both]
    joining(fake)
    started = time.monotonic()
    for one in made:
        getattr(one, how)()
    assert time.monotonic() - started < AT_ONCE_S
    assert fake.count("aborts") == 2
    assert both[0].state()[1] == "forming, 0 of 2 ranks"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(StaleHandleError, match="was closed"):
        made[0].await_ready(0.0)


def test_a_close_ends_ready_ones_in_good_order(
    made: list[beside.Beside],
    fake: FakeNccl,
) -> None:
    for one in made:
        one.await_ready(WAIT_S)
    made[0].stop_making()  # the communicators are made
    assert fake.count("aborts") == 0
    for one in made:
        one.close()
    assert fake.count("finalizes") == fake.count("aborts") == 2


def test_a_process_that_goes_amid_the_join_ends_it_at_once(
    ranks: Ranks,
    made: list[beside.Beside],
    fake: FakeNccl,
) -> None:
    fake.set("never_ready", 1)
    joining(fake)
    started = time.monotonic()
    ranks[0][1].client.goodbye()
    with pytest.raises(EpRuntimeError, match="ended while"):
        made[0].await_ready(WAIT_S)
    assert time.monotonic() - started < AT_ONCE_S


def test_a_group_that_breaks_amid_the_join_ends_it_with_the_reason(
    made: list[beside.Beside],
    fake: FakeNccl,
) -> None:
    fake.set("never_ready", 1)
    joining(fake)
    made[0].end(PeerLostError("the process of rank 1 is gone", rank=1))
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        made[0].await_ready(WAIT_S)


def test_a_failure_is_shown_and_logged_and_nothing_more(
    ranks: Ranks,
    fake: FakeNccl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.set("init_result", 6)
    both, generation = ranks
    one = of(both[0], generation)
    with pytest.raises(EpRuntimeError, match="remote process exited"):
        one.await_ready(WAIT_S)
    wait_until(lambda: both[0].state()[1].startswith("none: rank 0: NCCL"), "the listing says so")
    assert "goes on without NCCL communicators: NCCL: init" in caplog.text
    one.close()


def test_a_process_without_libnccl_says_so(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> nccl.NcclLibrary:
        raise RuntimeUnavailableError("this process has no libnccl.so.2")

    monkeypatch.setattr(nccl, "library", missing)
    both, generation = ranks
    one = of(both[0], generation)
    wait_until(lambda: both[0].state()[1].endswith("has no libnccl.so.2"), "the listing says so")
    one.close()


def test_a_failure_after_they_were_ready_is_shown(
    ranks: Ranks,
    made: list[beside.Beside],
    fake: FakeNccl,
) -> None:
    for one in made:
        one.await_ready(WAIT_S)
    fake.set("async_error", 6)
    wait_until(lambda: "remote process exited" in ranks[0][0].state()[1], "the listing says so")


@pytest.fixture
def windows_with_nccl(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups on CPU windows get communicators as groups on GPUs do, once NCCL has its kernels."""
    monkeypatch.setattr(forming, "WITH_NCCL_BESIDE", ("memfd",))
    monkeypatch.setattr(beside, "_loaded", set(range(64)))


def create(session: ep.Session, mesh: Any) -> ep.Group:
    return session.create_group(
        "g", mesh, ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8
    )


def test_kernels_are_loaded_once_where_a_process_has_several_devices(
    fake: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_loaded", set())
    for ordinals, inits in (([3], 0), ([0, 1], 2), ([1, 0], 2), ([0, 1, 2], 3)):
        beside.load_kernels(nccl.library(), ordinals)
        assert fake.count("inits") == fake.count("aborts") == inits, ordinals
    fake.set("init_result", 1)
    for _ in range(2):  # failed steps are retried
        with pytest.raises(EpRuntimeError, match=r"init of rank [01]: fake error"):
            beside.load_kernels(nccl.library(), [4, 5])


@pytest.mark.usefixtures("windows_with_nccl")
def test_a_group_goes_on_where_kernels_are_not_loaded(
    address: str, mesh: Any, fake: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group makes no communicators then, and says why: their kernels would load
    during steps.
    """
    said: list[str] = []

    def load(library: nccl.NcclLibrary, ordinals: Sequence[int]) -> None:
        library.load_kernels([7, 8], 0.2)

    monkeypatch.setattr(beside, "load_kernels", load)
    monkeypatch.setattr(communicators, "report", lambda *told: said.append(told[-1]))
    fake.set("never_ready", 1)
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        group = create(session, mesh)
        assert not isinstance(group._held.native_group, beside.GroupBesideNccl)
        group.check()
    assert fake.count("inits") == 2
    assert len(said) == 1
    assert "was not done within 0.2" in said[0]


@pytest.mark.usefixtures("windows_with_nccl")
def test_create_group_returns_before_they_are_ready_and_lists_them_later(
    address: str,
    mesh: Any,
    fake: FakeNccl,
) -> None:
    fake.set("never_ready", 1)
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        group = create(session, mesh)
        held = group._held.native_group
        assert isinstance(held, beside.GroupBesideNccl)
        wait_until(lambda: fake.count("inits") > 0, "they join")
        group.check()
        fake.set("never_ready", 0)
        held.beside.await_ready(WAIT_S)
        assert create(session, mesh) is group
        fake.set("never_ready", 1)
        replaced = session.create_group(
            "g",
            mesh,
            ep_axis="ep",
            num_experts=16,
            hidden_size=16,
            max_tokens_per_rank=8,
            replace=True,
        )
        started = time.monotonic()
        replaced.close()
        assert time.monotonic() - started < AT_ONCE_S
    assert fake.count("aborts") == fake.count("inits")


@pytest.mark.usefixtures("windows_with_nccl")
def test_a_process_that_wants_none_says_so_to_all(
    address: str,
    mesh: Any,
    admin: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL", "0")
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        create(session, mesh)
        (row,) = admin.groups()
        assert row["nccl_state"] == "none: rank 0: EP_RUNTIME_NCCL is 0 there"


def _listed(directory: Path) -> str:
    with source.open_source(f"unix://{directory}", timeout_s=WAIT_S) as admin:
        return "".join(row["nccl_state"] for row in admin.groups())


@pytest.mark.usefixtures("windows_with_nccl")
def test_a_daemon_that_was_started_again_hears_of_them(directory: Path, mesh: Any) -> None:
    daemon = start_daemon(directory)
    with ep.connect(f"unix://{directory}", job="tests", timeout_s=WAIT_S) as session:
        create(session, mesh)
        wait_until(lambda: _listed(directory) == "ready, 8 ranks", "the listing says so")
        os.kill(daemon.pid, signal.SIGKILL)
        assert daemon.stop() == -signal.SIGKILL
        daemon = start_daemon(directory)
        wait_until(lambda: _listed(directory) == "ready, 8 ranks", "the new one's listing says so")
    assert daemon.stop() == 0


_EXITS = """
import sys
from nccl_builds import FakeNccl, edge_library
from ep_runtime import nccl
from ep_runtime_client.groups import forming
from ep_runtime_client.nccl import beside
forming.WITH_NCCL_BESIDE = ("memfd",)
beside.IDS_AFTER_S = beside.JOIN_AFTER_S = 0.0
nccl.library = lambda: nccl.NcclLibrary(edge_library())
import jax, numpy as np, atexit
jax.config.update("jax_num_cpu_devices", 2)
import ep_runtime as ep
fake = FakeNccl()
fake.set("never_ready", 1)
atexit.register(lambda: print(fake.count("inits"), fake.count("aborts"), flush=True))
session = ep.connect("embedded")
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("ep",))
session.create_group("g", mesh, ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8)
while fake.count("inits") < 2:
    pass
"""


def test_a_process_that_ends_amid_the_join_ends_at_once(fake: FakeNccl) -> None:
    done = run_python("-c", _EXITS, limit_s=60, EP_RUNTIME_NCCL_LIBRARY=str(fake_library()))
    assert done.stdout.split() == ["2", "2"], done.stderr
