"""A job continues after SIGKILL at any moment, exactly as a job of the survivors alone would."""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import launch

from ep_runtime_client.base import jax_internals
from ep_runtime_client.cli.machine import nvml
from ep_runtime_client.daemons.departures import departures
from ep_runtime_client.distributed.peers import Peers

WAIT_S = 240.0
_ONE_GPU = 'jax.config.update("jax_platforms", "cuda")\n'
_BY_US = """
import functools, ep_runtime
beats = {"heartbeat_timeout_s": int(x) for x in [os.environ.get("TEST_BEATS")] if x}
distributed["by"] = functools.partial(ep_runtime.distributed.initialize, **beats)
jax.config.update("jax_compilation_cache_dir", os.environ["TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
"""
JOB = """
from distributed import going_on_job
going_on_job.run(say, hear)
os._exit(0)
"""
TRAIN, _REPLAY = (JOB.replace("run(", f"{name}(") for name in ("train", "replay"))
# Process 0 dies while it makes its backend again, for which the others wait too.
_DIES_ANEW = """
from ep_runtime_client.base import jax_internals
forget = jax_internals.forget_topology

def forget_and_die():
    forget()
    if index == 0:
        os.kill(os.getpid(), signal.SIGKILL)

jax_internals.forget_topology = forget_and_die
"""
# All-reduces begin after a process has died and before the others cut their connections.
_ADDS = """
import threading
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from ep_runtime_client.daemons import coordination

begun, cut = threading.Event(), coordination.cut_accepted
coordination.cut_accepted = lambda: begun.wait(60) and cut()

def step(x):
    sums = add(x)
    begun.set()
    return sums

for generation in ep.distributed.generations():
    with generation:
        mesh = jax.sharding.Mesh(np.array(generation.devices), ("ep",))
        whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ([], ["ep"]))
        ones = np.ones((mesh.size, 64), "float32")
        x = jax.make_array_from_callback(ones.shape, split, lambda part: ones[part])
        add = jax.jit(lambda x: (x.sum(0), x.sum()), out_shardings=whole)
        generation.step(add, x)
        if generation.number == 0:
            say(ready=True)
            hear()
        total = generation.step(step, x)[1]
say(total=float(total))
os._exit(0)
"""
STEPS = 4
LEAVES_S = 15.0  # half of XLA's timeout of a collective


def _of_gpus(processes: int) -> list[dict[str, str]]:
    """Variables that give each process one of the GPUs in our CUDA_VISIBLE_DEVICES, or of all.

    Processes share GPUs if there are not enough; NCCL supports that from 2.30 on.
    """
    ours = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = ours or [str(index) for index in range(len(nvml.probe().gpus) or processes)]
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    more = shared if processes > len(gpus) else {}
    visible = itertools.islice(itertools.cycle(gpus), processes)
    return [{"CUDA_VISIBLE_DEVICES": name, **more} for name in visible]


def start(
    place: Path,
    processes: int,
    devices: int,
    name: str,
    script: str = JOB,
    life_s: float = launch.LIFE_S,
    **more: str,
) -> launch.Job:
    """A job that makes STEPS steps in its last generation; `devices` 0 gives each process a GPU."""
    own = [{}] * processes if devices else _of_gpus(processes)
    return launch.Job(
        script,
        processes=processes,
        devices=devices,
        life_s=life_s,
        prologue=launch.prologue_of((launch.CPU if devices else _ONE_GPU) + _BY_US),
        own=[{"TEST_COORDINATOR": "node", **mine} for mine in own],
        RUNTIME_DIRECTORY=str(place),
        EP_RUNTIME_JOB=name,
        TEST_CACHE=str(place / "cache"),
        **{"TEST_STEPS": str(STEPS), **more},
    )


@pytest.mark.parametrize(("victim", "devices"), [(2, 2), (0, 1)], ids=["worker", "process_0"])
def test_survivors_restore_and_go_on_as_a_job_of_theirs_alone_would(
    place: Path, victim: int, devices: int
) -> None:
    state = place / "state.npz"
    with start(place, 4, devices, "whole", TEST_TO=str(state)) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 4
        job.workers[victim].kill()
        survivors = [worker for worker in job.workers if worker.index != victim]
        said = [worker.heard(WAIT_S) for worker in survivors]
        for worker in survivors:
            worker.tell()
        assert [worker.finish() for worker in survivors] == [0] * len(survivors)
    # Every process finds its programs there, whichever process has died.
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


def test_nobody_waits_for_the_next_of_several_sums_after_one_has_failed(place: Path) -> None:
    with start(place, 2, 3, "adds", _ADDS) as job:
        assert job.heard(WAIT_S) == [{"ready": True}] * 2
        survivor, victim = job.workers
        victim.kill()
        assert victim.finish() == -signal.SIGKILL
        survivor.tell()
        assert survivor.heard(LEAVES_S) == {"total": 3 * 64}
        assert survivor.finish() == 0


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
    """Four processes train; one dies, and 8 experts need two of the other three."""
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


PROCESSES = 4
HANG_S = 120.0
MOMENTS_S = 1.0  # of the steps in which a process dies
MESHES = 0.25  # how often the next process dies while the others still make the mesh
BACK = 0.5  # how often a process comes back after a loss, once in a job
REPLAYED = 300  # steps of each generation
REPLAYED_STEP_S = 1.0  # more than a step takes, even if processes share a GPU
Losses = dict[tuple[int, int], set[str]]


def losses_of(place: Path) -> Losses:
    """By generation and step: each process's records, without a line that a death cut off."""
    found: Losses = collections.defaultdict(set)
    for log in sorted(place.glob("*.jsonl")):
        for line in log.read_text().splitlines():
            if line.endswith("]"):
                generation, step, loss = json.loads(line)
                found[generation, step].add(loss)
    return found


class Replays:
    """Runs the first steps of generations again, in new jobs of as many processes."""

    def __init__(self, place: Path, devices: int) -> None:
        """`devices` of each process, as in `start`."""
        self.place, self.devices = place, devices
        self.steps = self.replayed = self.states = 0  # `states` is how many were compared

    def wrong_steps(self, folders: Iterable[Path], **more: str) -> Iterator[str]:
        """Names steps whose losses are not finite, or whose losses or states differ among processes
        or from those of new jobs.

        Each folder was TEST_TO of a job with TEST_SAVES; `more` are the new jobs' variables.
        """
        known: dict[str, list[tuple[int, set[str]]]] = {}
        again: dict[int, list[tuple[str, int, str]]] = collections.defaultdict(list)
        for folder in folders:
            # A generation without steps is left out, because its writer may have died in `_save`.
            files = collections.defaultdict(list)
            for (generation, step), losses in sorted(losses_of(folder).items()):
                files[str(folder / f"{generation}.npz")].append((step, losses))
            for file, following in itertools.zip_longest(files, [*files][1:], fillvalue=""):
                steps = files[file]
                self.steps += len(steps)
                for at, found in steps:
                    if len(found) > 1 or not math.isfinite(float.fromhex(min(found))):
                        yield f"{file}: step {at}: {found}"
                with np.load(file) as saved:
                    devices = int(saved["devices"])
                again[devices].append((file, min(len(steps), REPLAYED), following))
            known |= files
        for devices, replays in again.items():
            processes, name = devices // max(self.devices, 1), f"replay-{devices}"
            within_s = HANG_S + REPLAYED_STEP_S * sum(steps for _, steps, _ in replays)
            more["TEST_AGAIN"] = json.dumps(replays)
            replay = start(self.place, processes, self.devices, name, _REPLAY, within_s, **more)
            with replay as job:
                said = job.heard(within_s)[0]
            for file, losses in said["losses"].items():
                self.replayed += len(losses)
                for (step, found), loss in zip(known[file], losses, strict=False):
                    if len(found) == 1 and found != {loss}:
                        yield f"{file}: step {step}: {found}, and {loss} again"
            self.states += len(said["same"])
            yield from (f"{file}: another state" for file, same in said["same"].items() if not same)


def aborted(worker: launch.Worker) -> bool:
    """Whether gloo ended the process: after a loss, it aborts if a peer sends data of another
    collective. The job continues without the process.
    """
    return worker.ended and "gloo::EnforceNotMet" in worker.log.read_text(errors="replace")


def meet(live: list[launch.Worker], said: dict[int, Any], devices: int = 1) -> int:
    """Waits until all live processes have done a step together, with that many devices each.
    Removes processes that gloo has ended, and returns how many. `said` holds the last report of
    each.
    """
    before, ends = len(live), time.monotonic() + HANG_S
    while late := [worker for worker in live if not _with(said, worker, len(live) * devices)]:
        for worker in [each for each in live if aborted(each)]:
            live.remove(worker)
        try:
            said[late[0].index] = late[0].heard(1.0)
        except AssertionError:
            if time.monotonic() > ends or (late[0].ended and not aborted(late[0])):
                late[0].send(signal.SIGABRT)  # faulthandler prints where it waits
                raise
    return before - len(live)


def _with(said: dict[int, Any], worker: launch.Worker, devices: int) -> bool:
    return worker.index in said and said[worker.index]["devices"] == devices


def lose(running: launch.Job, rng: random.Random, most: int) -> int:
    """Kills processes of a job until one is left; returns how often."""
    live, lost, back = list(running.workers), 0, False
    said: dict[int, Any] = {}
    while True:
        if ended := meet(live, said):
            sys.stderr.write(f"gloo has ended {ended} processes\n")
            lost += ended
        dead = sorted({*range(PROCESSES)} - {worker.index for worker in live})
        if dead and not back and rng.random() < BACK:
            back = True
            live.append(running.start(rng.choice(dead)))
            said.pop(live[-1].index)
            continue
        while len(live) > 1 and lost < most:
            threading.Event().wait(rng.uniform(0, MOMENTS_S))
            victims = rng.sample(live, min(rng.choice([1, 1, 2]), len(live) - 1))
            for victim in victims:
                victim.send(signal.SIGKILL)
                live.remove(victim)
            lost += 1
            if rng.random() > MESHES:
                break
        else:
            return lost


@pytest.mark.doses(ci=2, full=200)
def test_no_loss_hangs_or_gives_a_wrong_number(place: Path, dose: int) -> None:
    rng, lost = random.Random(dose), 0
    folders: list[Path] = []
    while lost < dose:
        folders.append(place / f"after-{lost}")
        folders[-1].mkdir()
        more = {"TEST_TO": str(folders[-1]), "TEST_STEPS": str(10**9), "TEST_SAVES": ""}
        with start(place, PROCESSES, 1, folders[-1].name, TRAIN, **more) as running:
            lost += lose(running, rng, dose - lost)
    replays = Replays(place, devices=1)
    assert [*replays.wrong_steps(folders)] == []
    assert replays.replayed


ALL = {0: 10, 1: 11, 2: 12}
TWO = {0: 10, 1: 11}


class Waiting:
    """An RPC in which the daemon waits for all processes of a group."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_death_ends_groups_that_form_unless_the_others_have_met_without_it() -> None:
    followed, before, after = Peers(), Waiting(), Waiting()
    departures.keep(ALL)
    with departures.ending(before):
        followed._end_waits(2)
    assert before.cancelled
    followed.passed({2})
    departures.keep(TWO)
    with departures.ending(after):
        followed._end_waits(2)  # learns of it late
    assert not after.cancelled


def test_a_process_that_has_left_the_job_tells_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "_topology", b"devices")
    jax_internals.tell_topology()
