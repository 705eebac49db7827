"""Tests a job's state in node memory: its commits, what is restored, and whose
quota it counts on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_programs import WITHOUT_JAX, Program
from daemon_fixtures import WAIT_S, start_daemon, wait_until
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multiprocess.launch import CPU, Job, prologue_of

import ep_runtime as ep
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.distributed import state as state_module
from ep_runtime_client.distributed.peers import peers
from ep_runtime_client.groups import state_copy

State = ep.distributed.State


@pytest.fixture
def session(address: str) -> Iterator[ep.Session]:
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as found:
        yield found


def _on(mesh: Mesh, *axes: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))


def _mesh(*sizes: int, names: tuple[str, ...] = ("a", "b")) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices("cpu")[:count]).reshape(sizes), names[: len(sizes)])


def _values(step: int) -> dict[str, Any]:
    """Makes arrays whose every element encodes its place and step."""
    rows = np.arange(24 * 20, dtype=np.float32).reshape(24, 20)
    return {
        "adam": [rows + step, np.int32(step)],
        "half": jnp.asarray(rows[0] / 7 + step, jnp.bfloat16),
        "wi": (rows[:, None] + np.arange(4, dtype=np.float32)[:, None] + step).astype(np.float16),
        "none": np.zeros((0, 8), np.float32),
    }


def _abstract(mesh: Mesh, rows: Any, columns: Any) -> Any:
    """Rows and columns of the arrays over these axes."""
    specs = {
        "adam": [(rows, columns), ()],
        "half": (columns,),
        "wi": (rows, None, columns),
        "none": (),
    }
    return jax.tree.map(
        lambda x, axes: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on(mesh, *axes)),
        _values(0),
        specs,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _arrays(step: int, abstract: Any) -> Any:
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), _values(step), abstract)


def _check(found: Any, step: int, abstract: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, _values(step))
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, abstract)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _abstract(_mesh(3, 2), "a", "b"),
        lambda: _abstract(_mesh(2, 2), "b", "a"),
        lambda: _abstract(_mesh(4), "a", None),
        lambda: _abstract(_mesh(1), None, None),
    ],
)
def test_a_state_comes_back_on_another_mesh(session: ep.Session, other: Any) -> None:
    written, wanted = _abstract(_mesh(4, 2), ("a", "b"), None), other()
    state = State(session)
    state.commit(3, _arrays(3, written))
    state.wait()
    assert state.committed == 3
    step, found = State(session).restore(wanted)
    assert step == 3
    _check(found, 3, wanted)


def _fails(*_: Any) -> None:
    raise OSError("on purpose")


@pytest.mark.parametrize("unused", [0, 4000, 1 << 30])
def test_the_step_before_is_there_until_the_next_is_committed(
    session: ep.Session, monkeypatch: pytest.MonkeyPatch, unused: int
) -> None:
    monkeypatch.setattr(state_module, "_unused_bytes", lambda device: unused)
    on = _abstract(_mesh(4, 2), "a", "b")
    state = State(session)
    follow = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    for step in (1, 4, 5):
        arrays = _arrays(step, on)
        state.commit(step, arrays)
        follow(arrays)  # reuses the memory during the copy
    state.wait()
    assert state.committed == 5
    with pytest.raises(ep.InvalidArgumentError, match="greater than 5, the newest step of state"):
        state.commit(5, _arrays(5, on))
    with monkeypatch.context() as patch:
        patch.setattr(state_copy.np, "copyto", _fails)
        state.commit(6, _arrays(6, on))
        with pytest.raises(OSError, match="on purpose"):
            state.wait()
    step, found = state.restore(on)
    assert step == 5
    _check(found, 5, on)


def test_a_first_step_that_a_loss_left_uncommitted_is_committed_again(
    session: ep.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, state = _abstract(_mesh(2), "a", None), State(session)
    with monkeypatch.context() as patch:
        patch.setattr(state_copy.np, "copyto", _fails)
        state.commit(3, _arrays(3, on))
        with pytest.raises(OSError, match="on purpose"):
            state.wait()
    assert state.committed is None
    monkeypatch.setattr(peers, "generation", peers.generation + 1)
    state.commit(3, _arrays(3, on))
    state.wait()
    assert state.committed == 3


def test_a_session_that_is_over_writes_nothing(address: str) -> None:
    on = _abstract(_mesh(2), "a", None)
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        state = State(session)
        for step in (1, 2):
            state.commit(step, _arrays(step, on))
    with pytest.raises(ep.RuntimeUnavailableError, match="was closed"):
        state.commit(3, _arrays(3, on))


def test_what_cannot_be_restored_says_why(session: ep.Session) -> None:
    on, state = _abstract(_mesh(2), "a", None), State(session)
    with pytest.raises(ep.StaleHandleError, match="no committed step of state 'state'"):
        state.restore(on)
    state.commit(0, _arrays(0, on))
    state.wait()
    for change, text in [
        ({"half": on["adam"][0]}, r"\['half'\] is bfloat16\[20\] there and float32\[24, 20\] here"),
        ({"more": on["half"]}, r"\['more'\] is absent there and bfloat16\[20\] here"),
        ({"wi": 3}, r"state\['wi'\] must be a jax.Array"),
        ({"wi": jax.random.key(0)}, r"state\['wi'\] has dtype key<fry>"),
    ]:
        with pytest.raises(ep.InvalidArgumentError, match=text):
            state.restore(on | change)
    with pytest.raises(ep.InvalidArgumentError, match=r"State.restore` reads it"):
        session.group("state/0")
    with pytest.raises(ep.InvalidArgumentError, match="outlives this process"):
        State(ep.connect("none"))


def _buffers(admin: source.Source) -> list[Any]:
    return admin.call("ListBuffers", messages.ListBuffersRequest())["buffers"]


def test_a_restarted_daemon_has_the_copies(directory: Path) -> None:
    address, on = f"unix://{directory}", _abstract(_mesh(4, 2), "a", "b")
    child = start_daemon(directory)
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        state = State(session)
        for step in (1, 2):
            state.commit(step, _arrays(step, on))
        state.wait()
        os.kill(child.pid, signal.SIGKILL)
        child.stop()
        child = start_daemon(directory)
        try:
            step, found = State(session).restore(on)  # another State must ask the daemon
            assert step == 2
            _check(found, 2, on)
            state.commit(3, _arrays(3, on))
            state.wait()
            assert State(session).committed == 3
            state.release()
            with source.open_source(address, timeout_s=WAIT_S) as admin:
                wait_until(lambda: not _buffers(admin), "both copies are given back")
        finally:
            session.close()
            assert child.stop() == 0


def test_a_full_quota_refuses_with_numbers(directory: Path) -> None:
    child = start_daemon(directory, "--max-host-bytes-per-uid", "8M")
    try:
        with ep.connect(f"unix://{directory}", job="tests", timeout_s=WAIT_S) as session:
            on, state = _on(_mesh(1), None), State(session)
            state.commit(1, jax.device_put(np.zeros(1 << 20, np.uint8), on))
            with pytest.raises(ep.PoolExhaustedError, match="8.0 MiB") as refused:
                state.commit(2, jax.device_put(np.zeros(8 << 20, np.uint8), on))
            assert refused.value.fields["asked"] > 8 << 20
            assert state.committed == 1
    finally:
        assert child.stop() == 0


_JOB = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
session = ep.connect(job="survivors", timeout_s=60, on_loss="continue")
state = ep.distributed.State(session)

def abstract(processes):
    devices = [d for d in jax.devices() if d.process_index in processes]
    mesh = Mesh(np.array(devices), ("ep",))
    def one(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
    return {"experts": one((24, 40), "float32", "ep"), "bias": one((3, 24), "bfloat16", None, "ep"),
            "dense": [one((50,), "float32"), one((), "int32")]}

def value(like, step):
    return (np.arange(like.size).reshape(like.shape) + step).astype(like.dtype)

def arrays(step, processes):
    return jax.tree.map(lambda like: jax.make_array_from_callback(
        like.shape, like.sharding, lambda i, x=value(like, step): x[i]), abstract(processes))

def check(found, step):
    for array in jax.tree.leaves(found):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, value(array, step)[shard.index])

def die_in_the_middle():
    write, left = os.pwrite, [2]
    def pwrite(*args):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)
    os.pwrite = pwrite

def bytes_read():
    return int(open("/proc/self/io").read().split("\\nread_bytes: ")[1].split()[0])

say(ready=True)
for line in sys.stdin:
    order = json.loads(line)
    processes, step = order["processes"], order.get("step")
    if order["do"] == "commit":
        if order.get("dies") == index:
            die_in_the_middle()
        state.commit(step, arrays(step, processes))
        state.wait()
        say(wrote=step)
    elif order["do"] == "commit without a lost process":
        try:
            state.commit(step, arrays(step, processes))
        except ep.EpRuntimeError as error:
            say(error=type(error).__name__, text=str(error))
    elif order["do"] == "restore":
        state.committed  # loads what a first call loads
        before = bytes_read()
        step, found = state.restore(abstract(processes))
        jax.block_until_ready(found)
        read = bytes_read() - before
        check(found, step)
        say(step=step, read=read)
session.close()
say(closed=True)
os._exit(0)  # jax.distributed has no way on without a dead process
"""
_PROLOGUE = prologue_of(
    CPU + 'jax.config.update("jax_enable_recoverability", True)\n'
    "distributed.update(heartbeat_timeout_seconds=10, shutdown_timeout_seconds=1)\n"
)


def _job(address: str, processes: int, devices: int) -> Job:
    return Job(
        _JOB,
        processes=processes,
        devices=devices,
        prologue=_PROLOGUE,
        EP_RUNTIME_ADDRESS=address,
    )


def _tell(job: Job, live: list[int], do: str, **order: Any) -> None:
    for index in live:
        job.workers[index].tell({"do": do, "processes": live, **order})


def _heard(job: Job, live: list[int]) -> list[Any]:
    return [job.workers[index].heard() for index in live]


def test_survivors_and_a_restarted_job_have_the_newest_step_of_all(
    address: str, admin: source.Source
) -> None:
    with _job(address, processes=4, devices=2) as job:
        everybody, survivors = [0, 1, 2, 3], [0, 1, 2]
        job.heard()
        for step in (10, 20):
            _tell(job, everybody, "commit", step=step)
            assert _heard(job, everybody) == [{"wrote": step}] * 4
        _tell(job, everybody, "commit", step=30, dies=3)
        assert _heard(job, survivors) == [{"wrote": 30}] * 3
        wait_until(lambda: job.workers[3].ended, "process 3 died in the middle of a commit")
        _tell(job, survivors, "commit without a lost process", step=40)
        for said in _heard(job, survivors):
            assert said["error"] == "PeerLostError", said
            assert "rank 3 in group 'state/0'" in said["text"]
        _tell(job, survivors, "restore")
        assert [said["step"] for said in _heard(job, survivors)] == [20] * 3
        for step in (31, 41):
            _tell(job, survivors, "commit", step=step)
            assert _heard(job, survivors) == [{"wrote": step}] * 3
        wait_until(lambda: len(_buffers(admin)) == 2 * 4, "windows of four are given back")
        for worker in (job.workers[index] for index in survivors):
            worker.kill()
    wait_until(
        lambda: {b["state"] for b in _buffers(admin)} == {"RETAINED"},
        "the job is gone",
    )
    with _job(address, processes=2, devices=3) as job:
        job.heard()
        _tell(job, [0, 1], "restore")
        assert _heard(job, [0, 1]) == [{"step": 41, "read": 0}] * 2
        for step in (51, 61):
            _tell(job, [0, 1], "commit", step=step)
            assert _heard(job, [0, 1]) == [{"wrote": step}] * 2
        for worker in job.workers:
            worker.finish()
    wait_until(lambda: not _buffers(admin), "both copies are given back")


_COPY = """
from ep_runtime_client.groups.forming import Claim, form
from ep_runtime_client.groups.state_copy import HeldCopy, spec_of
from ep_runtime_client.groups.state_layout import Layout
client, held = ep.connect(job="tests", timeout_s=60)._open.client, None
while True:
    generation, processes, here = hear()
    if held is not None:
        held.close()
    spec = spec_of("state/0", Layout(tuple(processes), 4096, b"", ()), 0.0, generation)
    claim = Claim((processes.index(here),))
    held = HeldCopy(client, form(client, spec, claim, replace=True))
    say(generation=generation)
"""


def test_a_copy_forms_if_one_that_came_back_is_the_first(
    address: str, admin: source.Source, run_program: Callable[..., Program]
) -> None:
    """Process 3 takes rank 2, which process 2 had until process 1 died."""
    processes = [
        run_program(_COPY, prologue=WITHOUT_JAX, EP_RUNTIME_ADDRESS=address) for _ in range(4)
    ]
    for index in (0, 1, 2):
        processes[index].tell([0, [0, 1, 2], index])
    assert [process.heard() for process in processes[:3]] == [{"generation": 0}] * 3
    processes[1].kill()
    back = processes[3]
    back.tell([1, [0, 2, 3], 3])

    def forms() -> bool:
        groups = admin.call("ListGroups", messages.ListGroupsRequest())["groups"]
        return back.ended or any(group["group"]["state"] == "FORMING" for group in groups)

    wait_until(forms, "process 3 waits for the others")
    assert not back.ended
    for index in (2, 0):
        processes[index].tell([1, [0, 2, 3], index])
    assert [processes[index].heard() for index in (0, 2, 3)] == [{"generation": 1}] * 3
    wait_until(
        lambda: {buffer["generation"] for buffer in _buffers(admin)} == {2},
        "the windows before are given back",
    )
