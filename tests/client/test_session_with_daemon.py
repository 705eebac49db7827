"""A session with a real daemon: groups, layers, fencing, reclaim, threads. JAX runs here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from cases import SMALL
from daemon_fixtures import WAIT_S, wait_until
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime import board, native
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime.v1 import types_pb2
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import transport

_ARGUMENTS = SMALL | {"outer_axes": "dp"}


@pytest.fixture
def session(address: str) -> Iterator[ep.Session]:
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as found:
        yield found


def test_a_group_holds_one_window_per_rank_and_a_board(
    session: ep.Session, mesh: Any, admin: source.Source
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    assert group.spec.transport == "memfd"
    assert group._held.native_group is not None
    buffers = admin.buffers()
    windows = [row for row in buffers if row["kind"] == "WINDOW"]
    assert sorted(row["world_rank"] for row in windows) == list(range(8))
    assert {row["bytes"] for row in windows} == {group.staging_bytes_per_rank}
    assert group.staging_bytes_per_rank == board.window_bytes(group.spec)
    assert [row["bytes"] for row in buffers if row["kind"] == "BOARD"] == [
        board.board_bytes(group.spec)
    ]
    group.check()


def test_lookups_under_tracing_ask_the_daemon_nothing(
    session: ep.Session, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    layer = group.register_layer("a", top_k=2)

    def asked(*_: Any) -> Any:
        raise AssertionError("an RPC under tracing")

    found: list[Any] = []

    def model(x: Any) -> Any:
        here = ep.connect(session.address, job="tests").create_group("g", mesh, **_ARGUMENTS)
        found.extend([here, here.register_layer("a", top_k=2), here.layer("a"), ep.layer("g/a")])
        with pytest.raises(ep.InvalidArgumentError, match="call this outside jit"):
            here.layer("b")
        return x

    with monkeypatch.context() as patched:
        patched.setattr(transport.ControlChannel, "call", asked)
        jax.eval_shape(model, 1.0)
    assert found == [group, layer, layer, layer]


def test_closing_frees_at_once_whatever_retain_says(
    address: str, mesh: Any, admin: source.Source
) -> None:
    with ep.connect(address) as session:
        session.create_group("g", mesh, **_ARGUMENTS, retain_s=60)
        assert admin.buffers()
    wait_until(lambda: not admin.buffers(), "the memory is freed")
    assert admin.groups() == []
    assert {row["state"] for row in admin.sessions()} == {"CLOSED"}


@pytest.mark.parametrize(
    ("error", "kept"),
    [(KeyError("on purpose"), True), (SystemExit(1), True), (SystemExit(0), False)],
    ids=["KeyError", "exit 1", "exit 0"],
)
def test_an_error_that_leaves_the_block_keeps_the_windows(
    address: str, mesh: Any, admin: source.Source, error: BaseException, kept: bool
) -> None:
    def fail() -> None:
        with ep.connect(address, job="tests") as session:
            session.create_group("g", mesh, **_ARGUMENTS, retain_s=60)
            raise error

    with pytest.raises(type(error)):
        fail()
    if not kept:
        wait_until(lambda: not admin.buffers(), "the memory is freed")
        return
    wait_until(lambda: [row["state"] for row in admin.groups()] == ["RETAINED"], "it is kept")
    with ep.connect(address, job="tests") as session:  # the same process starts again
        group = session.create_group("g", mesh, **_ARGUMENTS, retain_s=60)
        assert group.reattached
    wait_until(lambda: not admin.buffers(), "the memory is freed")


def test_closing_one_group_leaves_the_other(
    session: ep.Session, mesh: Any, admin: source.Source
) -> None:
    first = session.create_group("first", mesh, **_ARGUMENTS)
    second = session.create_group("second", mesh, **_ARGUMENTS)
    first.close()
    assert [row["name"] for row in admin.groups()] == ["second"]
    second.check()
    again = session.create_group("first", mesh, **_ARGUMENTS)
    assert again.generation > second.generation


@pytest.mark.parametrize(("state", "kept"), [("BROKEN", True), ("READY", False)])
def test_a_group_that_is_broken_keeps_its_claim_when_it_makes_room(
    session: ep.Session, mesh: Any, admin: source.Source, state: str, kept: bool
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    group._held.changed(types_pb2.GroupState.Value(f"GROUP_STATE_{state}"), "said so")
    group._held.step_aside()
    assert [row["name"] for row in admin.groups()] == ["g"] * kept
    # The group forms again on the same memory; other memory is freed in the background.
    wait_until(lambda: bool(admin.buffers()) == kept, "the buffers of the group that is kept")
    with pytest.raises(ep.StaleHandleError, match="was closed"):
        group._held.require_open()


def test_a_one_device_mesh_works(session: ep.Session, devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[:1]), ("ep",))
    group = session.create_group("g", mesh, **{**_ARGUMENTS, "outer_axes": ()})
    assert group.spec.world_size == 1
    group.check()


def test_ten_thousand_layers_are_one_call(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    specs = [ep.LayerSpec(f"layer{i}", top_k=1) for i in range(10_000)]
    layers = group.register_layers(specs)
    assert [layer.name for layer in layers] == [spec.name for spec in specs]
    assert len({layer.id for layer in layers}) == 10_000
    assert group.register_layers(specs[:3]) == layers[:3]


def test_check_tells_an_overflow_once(session: ep.Session, mesh: Any) -> None:
    wide = {"max_token_dtype": "float32", "on_overflow": "error"}
    group = session.create_group("g", mesh, **_ARGUMENTS, **wide)
    layer = group.register_layer("moe", top_k=1)
    spread = np.tile(np.arange(8, dtype=np.int32), 8)[:, None]
    step = jax.jit(lambda x, idx: ep.dispatch(layer, x, idx, capacity=16).tokens)
    x = np.ones((64, 16), np.float32)
    for _ in range(2):
        with pytest.raises(ep.CapacityOverflowError):
            group.check(step(x, 0 * spread))
        group.check(step(x, spread))


def test_reclaim_makes_the_old_layer_stale(
    session: ep.Session, mesh: Any, admin: source.Source
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    layer = group.register_layer("a", top_k=1)
    assert layer.group is group
    admin.call("Reclaim", messages.ReclaimRequest(name="g"))
    wait_until(lambda: group._held.is_gone, "the client hears of the reclaim")
    with pytest.raises(ep.StaleHandleError, match=f"layer 'a'.*generation {group.generation}"):
        _ = layer.group
    with pytest.raises(ep.StaleHandleError):
        group.register_layer("b", top_k=1)
    with pytest.raises(ep.StaleHandleError):
        group.check()
    again = session.create_group("g", mesh, **_ARGUMENTS)
    assert again.generation > group.generation
    assert again.register_layer("a", top_k=1).group is again
    wait_until(
        lambda: admin.status()["pools"][0]["quarantined_bytes"] == 0, "the old memory is freed"
    )


def test_news_waits_for_no_calls_that_take_long_to_end(
    session: ep.Session, mesh: Any, admin: source.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort waits for kernels on a GPU, which may wait for the process that died."""
    told: list[str] = []
    over = threading.Event()

    def end(_: native.OpenGroup, why: ep.EpRuntimeError) -> None:
        told.append(str(why))
        over.wait(3 * WAIT_S)

    monkeypatch.setattr(native.OpenGroup, "end", end)
    for name in ("g", "h"):
        session.create_group(name, mesh, **_ARGUMENTS)
        admin.call("Reclaim", messages.ReclaimRequest(name=name))
    try:
        wait_until(lambda: len(told) == 2, "the client hears of both")
    finally:
        over.set()


def test_a_fenced_session_says_so_and_a_new_one_works(
    address: str, mesh: Any, admin: source.Source
) -> None:
    session = ep.connect(address)
    group = session.create_group("g", mesh, **_ARGUMENTS)
    request = messages.FenceRequest(session_id=session.session_id, reason="a test")
    assert admin.call("Fence", request)["groups"] == ["g"]
    wait_until(lambda: not session.alive, "the client hears of the fence")
    who = rf"by uid {os.getuid()} \(pid {os.getpid()}\) with ep-runtime fence on host .*"
    with pytest.raises(ep.SessionFencedError, match=f"fenced {who}: a test; connect again"):
        session.create_group("h", mesh, **_ARGUMENTS)
    with pytest.raises((ep.SessionFencedError, ep.StaleHandleError)):
        group.register_layer("a", top_k=1)
    with ep.connect(address) as fresh:
        assert fresh is not session
        fresh.create_group("g", mesh, **_ARGUMENTS).check()


def test_a_name_is_open_once_in_a_process(session: ep.Session, mesh: Any) -> None:
    session.create_group("g", mesh, **_ARGUMENTS)
    with ep.connect("none") as other:
        with pytest.raises(ep.InvalidArgumentError, match="'g' is open in this process's session"):
            other.create_group("g", mesh, **_ARGUMENTS)
        other.create_group("h", mesh, **_ARGUMENTS)


def test_names_that_nobody_knows(session: ep.Session, mesh: Any) -> None:
    with pytest.raises(ep.StaleHandleError, match="no group 'nobody'"):
        session.group("nobody")
    group = session.create_group("g", mesh, **_ARGUMENTS)
    with pytest.raises(ep.StaleHandleError, match="nothing"):
        group.layer("nothing")


def test_threads_share_one_session_and_one_group(address: str, mesh: Any) -> None:
    count = 8
    start = threading.Barrier(count)

    def work(index: int) -> tuple[Any, Any, Any]:
        start.wait(WAIT_S)
        session = ep.connect(address)
        group = session.create_group("shared", mesh, **_ARGUMENTS)
        own = session.create_group(f"own{index}", mesh, **_ARGUMENTS, transport="xla")
        return session, group, (group.register_layer("a", top_k=1), own.name)

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(work, range(count), timeout=WAIT_S))
    assert len({id(session) for session, _, _ in results}) == 1
    assert len({id(group) for _, group, _ in results}) == 1
    assert len({layer for _, _, (layer, _) in results}) == 1
    session = results[0][0]
    assert len(session.describe()["groups"]) == count + 1
    for _ in range(count):
        session.close()
    assert not session.alive


def test_labels_and_job_reach_the_listing(address: str, admin: source.Source) -> None:
    with ep.connect(address, job="night-run", labels={"team": "moe"}) as session:
        rows = {row["session_id"]: row for row in admin.sessions()}
        row = rows[session.session_id]
    assert (row["job"], row["labels"], row["state"]) == ("night-run", {"team": "moe"}, "ACTIVE")


def test_groups_that_come_and_go_leave_no_descriptor_open(session: ep.Session, mesh: Any) -> None:
    counts = []
    for _ in range(4):
        session.create_group("g", mesh, **_ARGUMENTS).close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]
    with pytest.raises(ep.PoolExhaustedError):
        session.create_group("g", mesh, **{**_ARGUMENTS, "max_tokens_per_rank": 1 << 20})
    assert len(os.listdir("/proc/self/fd")) <= counts[0]


def test_a_failed_mapping_leaves_the_group(
    session: ep.Session, mesh: Any, admin: source.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        raise ep.EpRuntimeError("no mapping today")

    open_files = []
    with monkeypatch.context() as patch:
        patch.setattr(native.NativeLibrary, "open_group", refuse)
        for _ in range(3):
            with pytest.raises(ep.EpRuntimeError, match="no mapping today"):
                session.create_group("g", mesh, **_ARGUMENTS)
            assert admin.groups() == []
            wait_until(lambda: not admin.buffers(), "the memory is freed")
            open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[0]
    session.create_group("g", mesh, **_ARGUMENTS).check()


def test_a_daemon_of_another_minor_version_is_told_once(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hello = transport.hello
    for version, warnings in (("0.1.99", 0), ("0.4.0", 1), ("0.4.0", 1)):

        def answer(*args: Any, version: str = version, **options: Any) -> Any:
            welcome = hello(*args, **options)
            welcome.server_version = version
            return welcome

        monkeypatch.setattr(transport, "hello", answer)
        ep.connect(address, timeout_s=WAIT_S).close()
        told = [text for text in caplog.messages if f"has version {version}, this client" in text]
        assert len(told) == warnings
