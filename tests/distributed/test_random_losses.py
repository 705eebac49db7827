"""Processes of jobs that go on die at random moments, one or two at once, until one is left.

In many jobs one of them comes back meanwhile.
"""

from __future__ import annotations

import collections
import json
import math
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed.test_going_on import JOB, start
from multiprocess import launch

PROCESSES = 4
HANG_S = 120.0
MOMENTS_S = 1.0  # of the steps in which a process dies
MESHES = 0.25  # how often the next one dies while the others still make the mesh
BACK = 0.5  # how often one comes back after a loss, once in a job
ALONE_STEPS = 1000
# Sums over other meshes differ in last bits, which the steps let grow.
TOLERANCE = 1e-2
Losses = dict[tuple[int, int], set[str]]


def losses_of(place: Path) -> Losses:
    """By generation and step: what the processes had, without a line that a death cut."""
    found: Losses = collections.defaultdict(set)
    for log in sorted(place.glob("*.jsonl")):
        for line in log.read_text().splitlines():
            if line.endswith("]"):
                generation, step, loss = json.loads(line)
                found[generation, step].add(loss)
    return found


def check_losses(place: Path, alone: dict[int, float]) -> None:
    """All processes had the same losses, which are those of a process alone."""
    for (generation, step), losses in losses_of(place).items():
        where = f"{place.name}: step {step} of generation {generation}"
        assert len(losses) == 1, f"{where}: processes differ, {losses}"
        loss = float.fromhex(*losses)
        assert math.isfinite(loss), where
        assert math.isclose(loss, alone.get(step, loss), rel_tol=TOLERANCE), where


def aborted(worker: launch.Worker) -> bool:
    """Whether gloo has ended the process: it aborts if a peer, after a loss, sends what belongs to
    another collective. The job goes on without it."""
    return worker.ended and "gloo::EnforceNotMet" in worker.log.read_text(errors="replace")


def meet(live: list[launch.Worker], said: dict[int, int]) -> int:
    """Waits until all live processes have done a step together; how many gloo has ended meanwhile,
    which are taken out. `said` has the devices of the last step that each has told."""
    before, ends = len(live), time.monotonic() + HANG_S
    while late := [worker for worker in live if said.get(worker.index) != len(live)]:
        for worker in [each for each in live if aborted(each)]:
            live.remove(worker)
        try:
            said[late[0].index] = late[0].heard(1.0)["devices"]
        except AssertionError:
            if time.monotonic() > ends or (late[0].ended and not aborted(late[0])):
                late[0].send(signal.SIGABRT)  # faulthandler writes where it waits
                raise
    return before - len(live)


def lose(running: launch.Job, rng: random.Random, most: int) -> int:
    """Kills processes of a job until one is left; how often."""
    live, lost, back = list(running.workers), 0, False
    said: dict[int, int] = {}
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


@pytest.mark.doses(ci=3, full=200)
def test_no_loss_hangs_or_gives_a_wrong_number(place: Path, dose: int) -> None:
    rng, lost = random.Random(dose), 0
    train = JOB.replace("run(", "train(")

    def job(name: str, processes: int, steps: int) -> launch.Job:
        (place / name).mkdir()
        more = {"TEST_TO": str(place / name), "TEST_STEPS": str(steps)}
        return start(place, processes, 1, name, train, **more)

    with job("alone", 1, ALONE_STEPS) as running:
        assert [said["devices"] for said in running.heard(HANG_S)] == [1]
        running.finish(HANG_S)
    alone = {step: float.fromhex(*loss) for (_, step), loss in losses_of(place / "alone").items()}
    assert len(alone) == ALONE_STEPS
    while lost < dose:
        name = f"after-{lost}"
        with job(name, PROCESSES, 10**9) as running:
            lost += lose(running, rng, dose - lost)
        check_losses(place / name, alone)
