"""Processes with GPUs die or stop during a step, and groups close during steps."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from daemon_fixtures import wait_until
from gpu.jobs import gpu_steps, layouts
from multiprocess.launch import Job, Worker

import ep_runtime as ep
from ep_runtime_client.cli.daemon import source

KNOWN_WITHIN_S = 2.0
_pause = threading.Event()  # never set: waits of a given length

_SCRIPT = """
from gpu.jobs import gpu_steps
session = ep.connect(timeout_s=60, on_loss="continue")  # they go on without the dead
more = json.loads(os.environ.get("TEST_SETTINGS", "{}"))
program = os.environ["TEST_PROGRAM"]
steps = gpu_steps.of(program, session, "g", jax.devices(), **more)
windows = gpu_steps.Windows(session, steps.group)
found = windows.digests() if index == 0 else []
steps.run()
group = steps.group
say(generation=group.generation, reattached=group.reattached, id=steps.layer.id, found=found)
while (order := hear()) != "end":
    if order == "loop":
        say(**steps.until_an_error(say))
    elif order == "windows":
        say(found=windows.digests())
    else:  # processes of a new group
        left = [d for d in jax.devices() if d.process_index in order]
        name = "of-" + "-".join(map(str, order))
        steps = gpu_steps.of(program, session, name, left, **more)
        steps.run()
        say(works=True)
session.close()
"""
_ENVIRONMENT = {"EP_RUNTIME_JOB": "training"}
any_program = pytest.mark.parametrize("program", gpu_steps.PROGRAMS)


def _lose(job: Job, others: list[Worker], victim: Worker) -> list[dict[str, Any]]:
    """Kills a process while the others step; returns their reports, which must come in time."""
    killed = time.monotonic()
    victim.kill()
    said: list[dict[str, Any]] = [worker.heard(30) for worker in others]
    first = victim.index * job.devices
    for row in said:
        assert row["kind"] == "PeerLostError", row
        assert row["rank"] in range(first, first + job.devices)
        assert row["process"] == victim.pid
        assert row["layer"] in ("moe/0", None)  # None: the process died between two steps
        assert row["ended"] - killed < KNOWN_WITHIN_S
    return said


def _start_loops(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("loop")
    for worker in workers:
        assert worker.heard() == {"looping": True}


def _regroup(workers: list[Worker]) -> None:
    """The surviving processes form a new group, and a step of it works."""
    for worker in workers:
        worker.tell([worker.index for worker in workers])
    for worker in workers:
        assert worker.heard() == {"works": True}


@any_program
def test_a_killed_process_ends_the_steps_of_the_others_who_go_on_without_it(
    job_gpus: int, address: str, admin: source.Source, program: str
) -> None:
    """After all processes are killed, the job restarts on the same memory."""
    environment = {**_ENVIRONMENT, "EP_RUNTIME_ADDRESS": address, "TEST_PROGRAM": program}
    layout = "one GPU each, visible alone"
    with layouts.job(_SCRIPT, layout, job_gpus, **environment) as job:
        before = job.heard()[0]
        assert not before["reattached"]
        *others, victim = job.workers
        _start_loops(job.workers)
        _lose(job, others, victim)
        job.workers[0].tell("windows")
        held = job.workers[0].heard()["found"]
        assert "" not in held
        _regroup(others)
        if len(others) > 1:  # this time the others wait in a kernel
            *last, victim = others
            for worker in last:
                worker.tell("loop")
            _pause.wait(0.5)
            _lose(job, last, victim)
            _regroup(last)
        for worker in reversed(job.workers):  # JAX ends processes that outlive process 0
            if not worker.ended:
                worker.kill()
    wait_until(lambda: _state(admin, "g") == "RETAINED", "the group is retained")
    with layouts.job(_SCRIPT, layout, job_gpus, **environment) as job:
        after = job.heard()
        assert after[0]["found"] == held
        for row in after:
            assert row["reattached"]
            assert row["generation"] > before["generation"]
            assert row["id"] == before["id"]
        job.tell("end")
        job.finish()
    wait_until(lambda: _state(admin, "g") == "", "the group is freed")


def _state(admin: source.Source, name: str) -> str:
    return next((row["state"] for row in admin.groups() if row["name"] == name), "")


def _waited_for(admin: source.Source) -> set[int]:
    """Returns world ranks of the group that other ranks wait for."""
    ranks = [row for row in admin.ranks() if row["group"] == "g"]
    return {row["waiting_for"] for row in ranks if row["state"] in ("WAITING", "MEETING")}


@any_program
def test_a_stopped_process_is_named_at_the_budget_and_learns_that_it_is_over(
    job_gpus: int, address: str, admin: source.Source, program: str
) -> None:
    with layouts.job(
        _SCRIPT,
        "two processes, all GPUs visible",
        job_gpus,
        **_ENVIRONMENT,
        EP_RUNTIME_ADDRESS=address,
        TEST_PROGRAM=program,
        TEST_SETTINGS='{"op_timeout_s": 3.0}',
    ) as job:
        job.heard()
        first, second = job.workers
        _start_loops(job.workers)
        second.send(signal.SIGSTOP)
        stopped = time.monotonic()
        late = set(range(job.devices, 2 * job.devices))
        # The board reports it before the budget ends.
        wait_until(lambda: late & _waited_for(admin), "a rank is waited for")
        said = first.heard(30)
        assert said["kind"] == "OpTimeoutError", said
        assert said["rank"] in late
        assert said["layer"] == "moe/0"
        assert 3.0 <= said["waited_s"] < 3.5
        assert 2.5 < said["ended"] - stopped < 3.0 + KNOWN_WITHIN_S
        second.send(signal.SIGCONT)
        goes_on = time.monotonic()
        told = second.heard(30)
        over = ("OpTimeoutError", "PeerLostError", "SessionFencedError", "StaleHandleError")
        assert told["kind"] in over, told
        assert told["ended"] - goes_on < 3.0 + KNOWN_WITHIN_S
        _regroup(job.workers)
        job.tell("end")
        job.finish()


@any_program
def test_a_group_closed_under_enqueued_steps_finishes_them_and_refuses_more(
    session: ep.Session, gpus: list[Any], program: str
) -> None:
    budget_s = 5.0
    steps = gpu_steps.of(program, session, "g", gpus, op_timeout_s=budget_s)
    for _ in range(gpu_steps.WARM_STEPS):
        steps.run()
    started = [steps.start() for _ in range(50)]
    closing = time.monotonic()
    steps.group.close()
    assert time.monotonic() - closing < budget_s + KNOWN_WITHIN_S
    right = [_is_right_or_nan(steps, out) for out in started]
    assert all(right) or layouts.TRIAL  # CPU devices refuse calls that had not begun
    assert not any(_is_right_or_nan(steps, out) for out in _refused_or_started(steps, 5))
    with pytest.raises(ep.StaleHandleError):
        steps.group.check()
    gpu_steps.Steps(session, "next", gpus).run()


@any_program
def test_a_compiled_program_goes_on_with_the_group_made_again(
    session: ep.Session, gpus: list[Any], program: str
) -> None:
    """Covers graphs that XLA recorded for the closed group and replays without calling the host."""
    steps = gpu_steps.of(program, session, "again", gpus)
    for _ in range(gpu_steps.WARM_STEPS):
        steps.run()
    for _ in range(3):
        generation = steps.group.generation
        steps.group.close()
        steps.make_group()
        assert steps.group.generation > generation
        for _ in range(gpu_steps.WARM_STEPS):
            steps.run()
    steps.group.close()
    # With other settings the recorded programs find that their own group is closed, and report it.
    other = gpu_steps.Steps(session, "again", gpus, max_tokens_per_rank=2 * gpu_steps.TOKENS)
    assert not any(_is_right_or_nan(steps, out) for out in _refused_or_started(steps, 3))
    with contextlib.suppress(ep.StaleHandleError):  # a replayed graph: the new group reports it
        other.group.check()
    other.run()


def _refused_or_started(steps: gpu_steps.Steps, count: int) -> list[Any]:
    """Runs steps after the close: calls from the host are refused, but a replayed graph starts."""
    outs = []
    for _ in range(count):
        try:
            with ep.translate_errors():
                outs.append(steps.start())
        except ep.EpRuntimeError:
            continue
    return outs


def _is_right_or_nan(steps: gpu_steps.Steps, out: Any) -> bool:
    """True if all shards are right; others hold NaN next to right values, or are refused."""
    try:
        with ep.translate_errors():
            shards = steps.shards_of(jax.block_until_ready(out))
    except ep.EpRuntimeError:
        return False
    is_right = True
    for got, want in shards:
        lost = np.isnan(got)
        is_right = is_right and not lost.any()
        np.testing.assert_array_equal(got[~lost], want[~lost])
    return is_right
