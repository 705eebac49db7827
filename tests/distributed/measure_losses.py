"""Measures how long a job takes to recover from losses: 4 processes with 2 CPU devices or a GPU
each.

    PYTHONPATH=.:server:client:tests python tests/distributed/measure_losses.py [--gpus] [--times N]

Prints seconds with a warm cache of programs, and the machine's load. After a loss, all processes
must have the same losses. Those of the first steps of every generation must be bit for bit those of
a new job with as many devices, from the same state; so must be the state that the next generation
restored, if it is of these steps.

--random N kills one process or two together, N times, at random moments; they come back before the
next time. --quiet-minutes M kills none of 8 processes that compile and collect garbage every few
steps. Both end with 1 if a process hangs, a step has a wrong loss, or none was killed but one lost.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from daemon_fixtures import wait_until
from distributed.going_on_job import READY
from distributed.test_going_on import HANG_S, MOMENTS_S, TRAIN, Replays, losses_of, meet, start
from multiprocess import launch

PROCESSES = 4
STUCK_AFTER_S = 3
TIMES = 2
QUIET_PROCESSES = 8
COMPILES = 5  # steps between compilations without a loss
LARGE = dict(TEST_HIDDEN="512", TEST_MLP="1024", TEST_EXPERTS="32", TEST_RETAIN="600")
_STAGES = {"connected": "to connect", "built": "to its state", "at": "to the next correct step"}
EXPERTS = "24"  # divided by 8, 6, 4 and 2 devices


class Measurement:
    """Jobs of one runtime directory and cache, and the seconds that they took."""

    def __init__(self, place: Path, devices: int, life_s: float) -> None:
        """`devices` of each process: CPU devices, or 0 for one GPU."""
        self.place, self.devices, self.life_s = place, devices, life_s
        self.jobs = 0
        self.taken_s: dict[str, list[float]] = collections.defaultdict(list)
        self.done: list[Path] = []  # folders with losses that are to be checked
        self.hangs = self.false = 0  # processes that stopped without having been killed

    @property
    def folder(self) -> Path:
        """The folder with the losses of the last job."""
        return self.place / str(self.jobs)

    def job(self, name: str = "", processes: int = PROCESSES, **more: str) -> launch.Job:
        """Starts the next job; a job of the same name finds its state."""
        self.jobs += 1
        self.folder.mkdir()
        saves = {} if name else {"TEST_SAVES": ""}
        more = {"TEST_EXPERTS": EXPERTS, "TEST_STEPS": str(10**9), **saves, **more}
        name, more["TEST_TO"] = name or str(self.jobs), str(self.folder)
        return start(self.place, processes, self.devices, name, TRAIN, self.life_s, **more)

    def all_died_and_came_back(self) -> None:
        """Kills processes 2 and 0, one after the other; each comes back."""
        with self.job() as job:
            self.first_steps(job.workers)
            for victim in (2, 0):
                began = time.monotonic()
                job.workers[victim].send(signal.SIGKILL)
                others = [worker for worker in job.workers if worker.index != victim]
                ended, _ = self.first_steps(others)
                self.note(f"SIGKILL of process {victim} to the next correct step", ended - began)
                began = time.monotonic()
                job.workers[victim] = job.start(victim)
                ended, connected = self.first_steps(job.workers)
                self.note(
                    "comes back: from its connect to its first correct step", ended - connected
                )
                self.note("comes back: from its start to its first correct step", ended - began)
        self.done.append(self.folder)

    def stands(self, what: str, number: signal.Signals, **more: str) -> None:
        """Stops a process by a signal."""
        with self.job(**more) as job:
            self.first_steps(job.workers)
            began = time.monotonic()
            first, victim, *rest = job.workers
            victim.send(number)
            assert victim.finish(HANG_S) == -signal.SIGKILL
            self.note(f"{what} to the end of the process", time.monotonic() - began)
            ended, _ = self.first_steps([first, *rest])
            self.note(f"{what} to the next correct step", ended - began)
        self.done.append(self.folder)

    def all_start_again(self) -> None:
        """Kills every process after a commit, and starts the job again."""
        name = f"again-{self.jobs}"
        with self.job(name, **LARGE) as job:
            self.first_steps(job.workers)
            wait_until(lambda: len(losses_of(self.folder)) > 2 * READY, "a step is committed")
            for worker in job.workers:
                worker.send(signal.SIGKILL)
        before = losses_of(self.folder)
        began = time.monotonic()
        with self.job(name, **LARGE) as job:
            said = [worker.heard(HANG_S) for worker in job.workers]
            first = (0, said[0]["first"])
            wait_until(lambda: first in losses_of(self.folder), "the loss is written")
            after = losses_of(self.folder)
        assert before.get(first, after[first]) == after[first]  # the same step again
        for what in ("connected", "built", "at"):
            at_s = max(one[what] for one in said) - began
            self.note(f"whole job of 52M parameters started again: {_STAGES[what]}", at_s)

    def at_random(self, times: int, rng: random.Random, ends: float) -> None:
        """Kills one or two processes that often, or until `ends`; they come back in between."""
        try:
            self._at_random(times, rng, ends)
        except AssertionError as hang:
            self.hangs += 1
            _say(f"{hang}")
        self.done.append(self.folder)

    def _at_random(self, times: int, rng: random.Random, ends: float) -> None:
        with self.job() as job:
            live = list(job.workers)
            self.first_steps(live)
            for number in range(1, times + 1):
                if time.monotonic() > ends:
                    return
                threading.Event().wait(rng.uniform(0, MOMENTS_S))
                victims = rng.sample(live, rng.choice([1, 2]))
                for victim in victims:
                    victim.send(signal.SIGKILL)
                    live.remove(victim)
                began = time.monotonic()
                ended, _ = self.first_steps(live)
                lost = sorted(victim.index for victim in victims)
                _say(f"loss {number}, of {lost}:")
                self.note(f"SIGKILL of {len(lost)} to the next correct step", ended - began)
                while dead := {*range(PROCESSES)} - {worker.index for worker in live}:
                    live += [job.start(index) for index in sorted(dead)]
                    ended, connected = self.first_steps(live)
                self.note("all are back: from the last connect", ended - connected)

    def quiet(self, processes: int, ends: float) -> None:
        """Runs without kills until `ends`."""
        how = {"TEST_COMPILES": str(COMPILES), "JAX_ENABLE_COMPILATION_CACHE": "false"}
        with self.job(processes=processes, **how) as job:
            self.first_steps(list(job.workers))
            # A process reports again in the next generation.
            while all(worker.silent() and not worker.ended for worker in job.workers):
                threading.Event().wait(1.0)
                if time.monotonic() > ends:
                    break
            alive = sum(not worker.ended for worker in job.workers)
        self.done.append(self.folder)
        found = losses_of(self.folder)
        generations = {generation for generation, _ in found}
        steps = 1 + max(step for _, step in found)
        _say(f"{steps} steps, {len(generations)} generations, {alive} of {processes} alive")
        self.false = len(generations) - 1 + processes - alive

    def first_steps(self, workers: list[launch.Worker]) -> tuple[float, float]:
        """Waits until these processes have done a step together; the latest end of it, and the
        latest start of a `connect`. Takes out those that gloo has ended meanwhile."""
        said: dict[int, Any] = {}
        if ended := meet(workers, said, max(self.devices, 1)):
            _say(f"gloo has ended {ended} processes")
        told = [said[worker.index] for worker in workers]
        return max(one["at"] for one in told), max(one["connected"] for one in told)

    def note(self, what: str, seconds: float) -> None:
        _say(f"{what}: {seconds:.1f}")
        self.taken_s[what].append(seconds)

    def report(self) -> int:
        """Prints all figures; returns 1 if something went wrong."""
        _say(f"\nload of the machine: {os.getloadavg()}, {os.cpu_count()} cores\n")
        if self.taken_s:
            _say("| seconds | times | min | median | max |\n|---|---|---|---|---|")
        for what, taken in self.taken_s.items():
            figures = f"{min(taken):.1f} | {statistics.median(taken):.1f} | {max(taken):.1f}"
            _say(f"| {what} | {len(taken)} | {figures} |")
        replays = Replays(self.place, self.devices)
        wrong = [*replays.wrong_steps(self.done, TEST_EXPERTS=EXPERTS)]
        compared = f"{replays.replayed} of {replays.steps} steps replayed"
        compared += f", {replays.states} states compared"
        _say("\n".join(["", *wrong, f"wrong losses or states: {len(wrong)}; {compared}"]))
        _say(f"hangs: {self.hangs}, processes lost unharmed: {self.false}")
        return int(self.hangs + len(wrong) + self.false > 0)

    def measure(self, stuck_after_s: int) -> None:
        """Measures each loss once."""
        self.all_died_and_came_back()
        stuck = {"TEST_STUCK_AFTER": str(stuck_after_s)}
        self.stands(f"Python stands, stuck_after_s={stuck_after_s}", signal.SIGUSR1, **stuck)
        self.stands("SIGSTOP", signal.SIGSTOP)
        self.all_start_again()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpus", action="store_true", help="a GPU for each process, or shared ones"
    )
    parser.add_argument("--times", type=int, default=TIMES, help="of each loss")
    parser.add_argument("--random", type=int, metavar="N", help="losses at random moments")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument(
        "--for",
        dest="for_s",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds in which losses begin",
    )
    parser.add_argument("--quiet-minutes", type=float, metavar="M", help="without a loss")
    parser.add_argument("--processes", type=int, default=QUIET_PROCESSES, help="without a loss")
    options = parser.parse_args()
    quiet_s = 60 * (options.quiet_minutes or 0.0)
    devices = 0 if options.gpus else 1 if quiet_s else 2
    ends = time.monotonic() + (quiet_s or options.for_s)
    with tempfile.TemporaryDirectory(prefix="ept-") as name:
        measured = Measurement(Path(name), devices, (quiet_s or options.for_s) + 2 * HANG_S)
        if quiet_s:
            measured.quiet(options.processes, ends)
        elif options.random:
            measured.at_random(options.random, random.Random(options.seed), ends)
        else:
            measured.measure(stuck_after_s=30)  # fills the cache
            measured.taken_s.clear()
            for _ in range(options.times):
                measured.measure(STUCK_AFTER_S)
        return measured.report()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
