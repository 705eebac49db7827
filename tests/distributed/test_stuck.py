"""Ends processes that live but make no progress; the job continues without them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from distributed import test_going_on
from multiprocess import launch

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.distributed import peers
from ep_runtime_client.distributed.peers import For, stuck_of

WAIT_S = 240.0
# Longer than a test's processes differ while they compile.
STUCK_AFTER_S = 8
NEVER_S = 3600
# After three steps each process reads what to do before or in the next step.
_JOB = """
from distributed import going_on_job as job
stuck_after_s = float(os.environ["TEST_STUCK_AFTER"])
session = ep.connect("node", on_loss="continue", timeout_s=60)
for generation in ep.distributed.generations(stuck_after_s=stuck_after_s):
    with generation:
        mesh = ep.distributed.fit_mesh(
            generation.devices, {"ep": None}, num_experts=12, batch=24
        ).mesh
        step = job.build(session, mesh, generation.number)
        state = job.put(job.first_state(), job.layout(mesh, jax.sharding.PartitionSpec("ep")))
        for number in range(6):
            work_s = 0.0
            if number == 3 and generation.number == 0:
                say(ready=True)
                what = hear()
                if what == "stand":
                    os.read(os.pipe()[0], 1)
                work_s = what

            def work(state, number):
                ends = time.monotonic() + work_s
                while time.monotonic() < ends:
                    pass
                return step(state, number)

            loss, state = generation.step(work, state, number)
    loss = float(loss)
say(generation=generation.number, processes=len(generation.devices), right=loss == loss)
hear()
os._exit(0)
"""


def start(place: Path, *, stuck_after_s: float, heartbeat_timeout_s: int) -> launch.Job:
    """A job of three processes with one device each."""
    waits = {"TEST_STUCK_AFTER": str(stuck_after_s), "TEST_BEATS": str(heartbeat_timeout_s)}
    return test_going_on.start(place, 3, 1, "stuck", _JOB, **waits)


def fences(place: Path) -> list[str]:
    """Returns the node daemon's events about sessions that were fenced."""
    with source.open_source(f"unix://{place}/node", timeout_s=WAIT_S) as daemon:
        return [x["message"] for x in daemon.events(0) if x["kind"] == "session.fenced"]


def goes_on_without(job: launch.Job, lost: int) -> None:
    """Waits until the other processes make the steps of the next generation."""
    others = [worker for worker in job.workers if worker.index != lost]
    for worker in others:
        assert worker.heard(WAIT_S) == {"generation": 1, "processes": 2, "right": True}
    for worker in others:
        worker.tell()
        assert worker.finish(WAIT_S) == 0


def test_a_process_whose_python_stands_is_named_and_ended(place: Path) -> None:
    with start(place, stuck_after_s=STUCK_AFTER_S, heartbeat_timeout_s=100) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        for worker in job.workers:
            worker.tell("stand" if worker.index == 1 else 0.0)
        stuck = job.workers[1]
        assert stuck.finish(WAIT_S) == -signal.SIGKILL
        (told,) = fences(place)
        assert f"process {stuck.pid} was fenced" in told
        assert f"all others of the job have waited for it for {STUCK_AFTER_S} s" in told
        assert f"wait for rank 1 (process {stuck.pid}, index 1) in prepare of layer 'moe'" in told
        goes_on_without(job, 1)
        assert "processes [1] of the job are stuck" in job.tails()


def test_a_stopped_process_is_fenced_and_cannot_go_on(place: Path) -> None:
    with start(place, stuck_after_s=NEVER_S, heartbeat_timeout_s=5) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        stopped = job.workers[0]
        stopped.send(signal.SIGSTOP)
        for worker in job.workers:
            worker.tell(0.0)
        assert stopped.finish(WAIT_S) == -signal.SIGKILL
        (told,) = fences(place)
        assert f"process {stopped.pid} was fenced" in told
        assert "its heartbeats have stopped" in told
        goes_on_without(job, 0)


def test_steps_that_are_slow_in_all_or_a_little_in_one_end_nobody(place: Path) -> None:
    with start(place, stuck_after_s=STUCK_AFTER_S, heartbeat_timeout_s=100) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        for worker in job.workers:
            worker.tell(STUCK_AFTER_S * (1.25 if worker.index == 1 else 1.1))
        assert job.heard(WAIT_S) == [{"generation": 0, "processes": 3, "right": True}] * 3
        assert fences(place) == []
        job.tell()
        job.finish(WAIT_S)


def test_a_daemon_that_is_killed_costs_no_step(place: Path) -> None:
    with start(place, stuck_after_s=NEVER_S, heartbeat_timeout_s=5) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        with source.open_source(f"unix://{place}/node", timeout_s=WAIT_S) as daemon:
            os.kill(daemon.status()["pid"], signal.SIGKILL)
        job.tell(0.0)
        assert job.heard(WAIT_S) == [{"generation": 0, "processes": 3, "right": True}] * 3
        job.tell()
        job.finish(WAIT_S)


@pytest.mark.parametrize(
    ("waits", "stuck"),
    [
        ({0: For.RESULTS, 1: For.RESULTS, 2: For.OTHERS}, [3]),
        ({0: For.RESULTS, 1: For.RESULTS}, [2, 3]),
        ({0: For.RESULTS}, []),  # more processes are missing than wait
        ({0: For.RESULTS, 1: For.STEPS}, []),
        ({}, []),
        (dict.fromkeys(range(4), For.RESULTS), []),  # no process knows which one
        ({0: For.RESULTS, 1: For.OTHERS, 2: For.OTHERS, 3: For.OTHERS}, [0]),
        ({0: For.RESULTS, 1: For.RESULTS, 2: For.OTHERS, 3: For.OTHERS}, [0, 1]),
        ({0: For.RESULTS, 1: For.RESULTS, 2: For.RESULTS, 3: For.OTHERS}, []),
        ({0: For.RESULTS, 1: For.STEPS, 2: For.STEPS, 3: For.STEPS}, []),
        (dict.fromkeys(range(4), For.OTHERS), []),
    ],
)
def test_who_is_stuck(waits: dict[int, For], stuck: list[int]) -> None:
    assert stuck_of(waits, range(4)) == stuck


@pytest.mark.parametrize(("waited_s", "stuck"), [(0.5, [1, 2]), (1.0, []), (3.0, [1])])
def test_a_process_that_came_late_to_the_wait_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, stuck: list[int]
) -> None:
    """Processes 0 and 3 have waited for three seconds, 2 for `waited_s`, and 1 is stopped."""
    ended: list[int] = []
    ours = peers._Wait(For.RESULTS, "met", range(4), 0.0)
    told = {p: ours.told(s, 3.0) for p, s in ((0, 3.0), (2, waited_s), (3, 3.0))}
    monkeypatch.setattr(peers, "_read", lambda key: {p: text for p, text in told.items() if text})
    monkeypatch.setattr(peers, "_ours", lambda: 3)
    followed = peers.Peers()
    monkeypatch.setattr(followed, "_end", lambda processes, reason: ended.extend(processes) or [])
    with followed.waiting(For.RESULTS, "met", range(4)):
        followed._wait = ours
        followed._look(ours, 3.0)
    assert ended == stuck
