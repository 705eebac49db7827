"""The daemon dies during training and restarts: no step fails, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from child_programs import Start
from daemon_fixtures import start_daemon, wait_gone, wait_until
from faults import members
from harness import memfds_of
from multiprocess.launch import Job

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

BACK_S = 10.0  # on a busy machine; the figure itself is printed

_TRAIN = """
import threading
from jax.experimental import multihost_utils
session = ep.connect(timeout_s=60)
SETTINGS = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8, max_top_k=2,
                alignment=8, max_token_dtype="float32", op_timeout_s=600, retain_s=60)
group = session.create_group("g", mesh_of(), **SETTINGS)
layer = group.register_layer("moe/0", top_k=1)
stack = group.register_layer_stack("s", 3, top_k=2)
"""
_TRAIN += members.STEP
_TRAIN += """
run()
say(generation=group.generation, session=session.session_id, ids=[layer.id, stack[2].id])
orders, steps, said = [], 0, 0.0
def listen():
    for line in sys.stdin:
        orders.append(json.loads(line))
threading.Thread(target=listen, daemon=True).start()
while not multihost_utils.broadcast_one_to_all(np.int32(len(orders))):  # all stop together
    for _ in range(50):
        run()
        group.check()
    steps += 50
    if time.monotonic() - said > 0.25:  # all of it fits into the pipe of a slow reader
        said = time.monotonic()
        say(steps=steps)
"""

_AFTER = """
started = time.monotonic()
again = group.register_layer(f"late/{index}", top_k=2)  # waits for the daemon
say(took_s=time.monotonic() - started, ended=time.monotonic(), steps=steps,
    generation=group.generation, session=session.session_id,
    state=group.describe()["state"], same=group.register_layer("moe/0", top_k=1) == layer)
group.close()
session.close()
say(closed=True)
"""


_ALONE = (
    _TRAIN.split("say(generation")[0]
    + """
say(ready=True)
hear()
say(waits=True)
try:
    with ep.translate_errors():
        run()
except ep.PeerLostError as error:
    say(rank=error.fields["rank"], gone=group._held.is_gone)
hear()
os._exit(0)
"""
)


@pytest.fixture
def daemons(directory: Path) -> Iterator[list[runtime.Child]]:
    """Daemons on one directory, the last of them alive; it must end well after the test."""
    started = [start_daemon(directory)]
    yield started
    for child in started[:-1]:
        child.stop()
    assert started[-1].stop() == 0, started[-1].log_tail(50)


def _steps(job: Job, more: int) -> int:
    """Waits for that many more steps of every process; returns the largest step number."""
    return max(worker.heard()["steps"] for _ in range(more) for worker in job.workers)


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)], ids=["1x4", "2x2"])
def test_a_killed_daemon_costs_no_step_and_comes_back_with_everything(
    directory: Path,
    daemons: list[runtime.Child],
    capsys: pytest.CaptureFixture[str],
    processes: int,
    devices: int,
) -> None:
    address = f"unix://{directory}"
    with Job(
        _TRAIN + _AFTER, processes=processes, devices=devices, EP_RUNTIME_ADDRESS=address
    ) as job:
        before = job.heard()
        memory = memfds_of(daemons[0].pid)
        assert len(memory) == processes * devices + 1
        _steps(job, 1)
        os.kill(daemons[0].pid, signal.SIGKILL)
        assert daemons[0].stop() == -signal.SIGKILL
        _steps(job, 4)  # no daemon serves, and steps continue
        begun = time.monotonic()
        daemons.append(start_daemon(directory))
        ready_s = time.monotonic() - begun
        with source.open_source(address, timeout_s=60) as admin:
            wait_until(lambda: _all_back(admin, processes), "the sessions are back")
            back_s = time.monotonic() - begun
            assert memfds_of(daemons[1].pid) == memory
            job.tell("stop")
            after = _said_after(job)
            for was, now in zip(before, after, strict=True):
                assert now["state"] == "READY"
                assert now["same"]
                assert now["generation"] == was["generation"]
                assert now["session"] == was["session"]
            assert len({row["steps"] for row in after}) == 1
            job.finish()
            assert admin.groups() == []
            wait_until(lambda: not admin.buffers(), "the memory is freed")
    assert back_s < BACK_S
    with capsys.disabled():
        sys.stdout.write(
            f"\n{processes}x{devices}: no failed step of {after[0]['steps']}; the new daemon "
            f"answered after {ready_s:.2f} s and had everything after {back_s:.2f} s"
        )


def _all_back(admin: source.Source, processes: int) -> bool:
    active = [row for row in admin.sessions() if row["state"] == "ACTIVE"]
    groups = admin.groups()
    ready = bool(groups) and groups[0]["state"] == "READY" and not groups[0]["wanted_ranks"]
    return len(active) == processes and ready


def _said_after(job: Job) -> list[Any]:
    """Returns each process's report after its last step."""
    found = []
    for worker in job.workers:
        row = worker.heard()
        while "took_s" not in row:
            row = worker.heard()
        assert worker.heard() == {"closed": True}
        found.append(row)
    return found


def _descriptors(job: Job) -> int:
    """Counts the open descriptors of all the job's processes."""
    return sum(len(os.listdir(f"/proc/{worker.pid}/fd")) for worker in job.workers)


@pytest.mark.slow
@pytest.mark.doses(ci=0, full=100)
def test_many_killed_daemons_cost_no_step_and_leak_nothing(
    directory: Path,
    daemons: list[runtime.Child],
    dose: int,
    record_property: Callable[[str, object], None],
) -> None:
    address = f"unix://{directory}"
    slowest_s, files = 0.0, 0
    with Job(
        _TRAIN + _AFTER,
        processes=2,
        devices=1,
        life_s=280.0 + 10.0 * dose,
        EP_RUNTIME_ADDRESS=address,
    ) as job:
        job.heard()
        memory = memfds_of(daemons[0].pid)
        for _ in range(dose):
            _steps(job, 1)
            os.kill(daemons[-1].pid, signal.SIGKILL)
            assert daemons[-1].stop() == -signal.SIGKILL
            begun = time.monotonic()
            daemons.append(start_daemon(directory))
            with source.open_source(address, timeout_s=60) as admin:
                wait_until(lambda admin=admin: _all_back(admin, 2), "the sessions are back")
            slowest_s = max(slowest_s, time.monotonic() - begun)
            assert memfds_of(daemons[-1].pid) == memory
            files = files or _descriptors(job)
            # Connections to the old daemon may close a moment after those to the new one open.
            wait_until(
                lambda most=files + 2: _descriptors(job) <= most,
                "descriptors are as few as at first",
            )
        job.tell("stop")
        _said_after(job)
        job.finish()
    record_property("everything back after, at worst", f"{slowest_s:.2f} s")


def test_a_daemon_without_its_journal_takes_the_clients_word(
    directory: Path, daemons: list[runtime.Child]
) -> None:
    address = f"unix://{directory}"
    with Job(_TRAIN + _AFTER, processes=2, devices=1, EP_RUNTIME_ADDRESS=address) as job:
        before = job.heard()
        memory = memfds_of(daemons[0].pid)
        os.kill(daemons[0].pid, signal.SIGKILL)
        daemons[0].stop()
        for path in directory.iterdir():
            path.unlink()
        daemons.append(start_daemon(directory))
        with source.open_source(address, timeout_s=60) as admin:
            wait_until(lambda: _all_back(admin, 2), "the sessions are back")
            assert memfds_of(daemons[1].pid) == memory
        job.tell("stop")
        assert {row["generation"] for row in _said_after(job)} == {before[0]["generation"]}
        job.finish()


_REVIVED = """
session = ep.connect(timeout_s=60)
group = session.create_group("g", mesh_of(), **ARGUMENTS)
say(daemon=session.daemon_pid)
hear()
layer = group.register_layer("a", top_k=1)  # waits for the new daemon
say(daemon=session.daemon_pid, state=group.describe()["state"])
hear()
session.close()
"""


@pytest.mark.parametrize("kind", ["embedded", "node"])
def test_who_started_a_daemon_starts_it_again(
    run_program: Start, directory: Path, kind: str
) -> None:
    program = run_program(_REVIVED, EP_RUNTIME_ADDRESS=kind, RUNTIME_DIRECTORY=str(directory))
    first = program.heard()["daemon"]
    os.kill(first, signal.SIGKILL)
    program.tell()
    second = program.heard()
    assert second["daemon"] != first
    assert second["state"] == "READY"
    program.end()
    wait_gone(second["daemon"])


def test_a_process_that_dies_while_the_daemon_is_away_is_lost_when_it_is_back(
    directory: Path, daemons: list[runtime.Child]
) -> None:
    address = f"unix://{directory}"
    with Job(_ALONE, processes=2, devices=1, EP_RUNTIME_ADDRESS=address) as job:
        job.heard()
        os.kill(daemons[0].pid, signal.SIGKILL)
        daemons[0].stop()
        job.workers[1].kill()
        job.workers[0].tell()
        assert job.workers[0].heard() == {"waits": True}
        daemons.append(start_daemon(directory))
        said = job.workers[0].heard(60)
        assert said["rank"] == 1
        assert said["gone"]
        job.workers[0].tell()
        assert job.workers[0].finish() == 0
