"""A job goes on after SIGKILL of processes, and computes what a job of the survivors computes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiprocess import launch

WAIT_S = 240.0
_BY_US = (
    launch.CPU
    + """
import functools, ep_runtime
beats = {"heartbeat_timeout_s": int(x) for x in [os.environ.get("TEST_BEATS")] if x}
distributed["by"] = functools.partial(ep_runtime.distributed.initialize, **beats)
"""
)
JOB = """
from distributed import going_on_job
going_on_job.run(say, hear)
os._exit(0)
"""
# Process 0 dies while it makes its backend anew, for which the others wait too.
_DIES_ANEW = """
from ep_runtime_client.base import jax_internals
forget = jax_internals.forget_topology

def forget_and_die():
    forget()
    if index == 0:
        os.kill(os.getpid(), signal.SIGKILL)

jax_internals.forget_topology = forget_and_die
"""
STEPS = 4


def start(
    place: Path, processes: int, devices: int, name: str, script: str = JOB, **more: str
) -> launch.Job:
    """A job whose last generation makes STEPS steps."""
    return launch.Job(
        script,
        processes=processes,
        devices=devices,
        prologue=launch.prologue_of(_BY_US),
        own=[{"TEST_COORDINATOR": "node"}] * processes,
        RUNTIME_DIRECTORY=str(place),
        EP_RUNTIME_JOB=name,
        JAX_COMPILATION_CACHE_DIR=str(place / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        **{"TEST_STEPS": str(STEPS), **more},
    )


@pytest.mark.parametrize(
    ("victims", "devices"), [([2], 2), ([0], 1), ([1, 3], 1)], ids=["worker", "process_0", "two"]
)
def test_survivors_restore_and_go_on_as_a_job_of_theirs_alone_would(
    place: Path, victims: list[int], devices: int
) -> None:
    state = place / "state.npz"
    with start(place, 4, devices, "whole", TEST_TO=str(state)) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 4
        for victim in victims:
            job.workers[victim].kill()
        survivors = [worker for worker in job.workers if worker.index not in victims]
        said = [worker.heard(WAIT_S) for worker in survivors]
        for worker in survivors:
            worker.tell()
        assert [worker.finish() for worker in survivors] == [0] * len(survivors)
    # Every process finds its programs there, whoever has died.
    assert len([*(place / "cache").glob("jit_train_step-*-cache")]) == 4 + len(survivors)
    assert said == [said[0]] * len(survivors)
    assert said[0]["devices"] == len(survivors) * devices
    with start(place, len(survivors), devices, "alone", TEST_FROM=str(state)) as job:
        alone = job.heard(WAIT_S)
        job.tell()
        job.finish()
    assert alone == said


def test_nobody_waits_for_a_process_that_died_before_its_group_formed(place: Path) -> None:
    with start(place, 3, 1, "whole", TEST_DIES="1 in 1", TEST_TO=str(place / "state.npz")) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        job.workers[2].kill()
        first, second, _ = job.workers
        assert second.finish(WAIT_S) == -signal.SIGKILL
        assert first.heard(WAIT_S)["devices"] == 1
        first.tell()
        assert first.finish() == 0


def test_nobody_waits_for_process_0_that_died_before_it_told_the_devices(place: Path) -> None:
    to = {"TEST_TO": str(place / "state.npz")}
    with start(place, 4, 1, "whole", _DIES_ANEW + JOB, **to) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 4
        job.workers[3].kill()
        first, *others, _ = job.workers
        assert first.finish(WAIT_S) == -signal.SIGKILL
        for worker in others:
            assert worker.heard(WAIT_S)["devices"] == 2
        for worker in others:
            worker.tell()
            assert worker.finish() == 0


def test_a_process_without_a_device_in_the_mesh_waits_for_the_end_of_the_others(
    place: Path,
) -> None:
    """Four processes train; then there are three, of which 8 experts take two."""
    with start(place, 4, 1, "whole", TEST_EXPERTS="8", TEST_TO=str(place / "state.npz")) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 4
        job.workers[0].kill()
        first, second, idle = job.workers[1:]
        assert idle.heard(WAIT_S) == {"idle": True}
        trained = [first.heard(WAIT_S), second.heard(WAIT_S)]
        assert trained[0] == trained[1]
        assert (trained[0]["devices"], len(trained[0]["losses"])) == (2, STEPS)
        assert idle.heard(WAIT_S)["losses"] == []  # it leaves the loop too
        for worker in (first, second, idle):
            worker.tell()
        assert [worker.finish() for worker in (first, second, idle)] == [0, 0, 0]


def test_a_process_that_comes_back_joins_at_a_step_boundary(place: Path) -> None:
    state = place / "state.npz"
    with start(place, 3, 1, "whole", TEST_TO=str(state), TEST_LAST="2") as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 3
        job.workers[2].kill()
        others = job.workers[:2]
        assert [worker.heard(WAIT_S) for worker in others] == [{"ready": True}] * 2
        together = [*others, job.start(2)]
        said = [worker.heard(WAIT_S) for worker in together]
        for worker in together:
            worker.tell()
        assert [worker.finish() for worker in together] == [0] * 3
    assert said == [said[0]] * 3
    assert (said[0]["devices"], len(said[0]["losses"])) == (3, STEPS)
    with start(place, 3, 1, "alone", TEST_FROM=str(state)) as job:
        alone = job.heard(WAIT_S)[0]
        job.tell()
        job.finish()
    assert alone == said[0]  # bit for bit
