"""Measures how long a job takes to go on after a loss: 4 processes with 2 CPU devices each, or
with a GPU each.

    PYTHONPATH=.:server:client:tests python tests/distributed/measure_losses.py [--gpus] [--times N]

Prints seconds with a warm cache of programs, and the machine's load. The losses of every step must
be those of a process alone.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from daemon_fixtures import wait_until
from distributed.going_on_job import READY
from distributed.test_going_on import ALONE_STEPS, HANG_S, JOB, check_losses, losses_of, start
from multiprocess import launch

PROCESSES = 4
STUCK_AFTER_S = 3
TIMES = 2
LARGE = dict(TEST_HIDDEN="512", TEST_MLP="1024", TEST_EXPERTS="32", TEST_RETAIN="600")
_STAGES = {"connected": "to connect", "built": "to its state", "at": "to the next correct step"}
_TRAIN = JOB.replace("run(", "train(")


class Measurement:
    """Jobs of one runtime directory and cache, and the seconds that they took."""

    def __init__(self, place: Path, devices: int) -> None:
        """`devices` of each process: CPU devices, or 0 for one GPU."""
        self.place, self.devices = place, devices
        self.jobs = 0
        self.taken_s: dict[str, list[float]] = collections.defaultdict(list)
        with self.job(processes=1, steps=ALONE_STEPS) as alone:
            alone.heard(HANG_S)
            alone.finish(HANG_S)
        losses = losses_of(self.folder)
        self.alone = {step: float.fromhex(*loss) for (_, step), loss in losses.items()}

    @property
    def folder(self) -> Path:
        """Losses of the last job."""
        return self.place / str(self.jobs)

    def job(
        self, name: str = "", processes: int = PROCESSES, steps: int = 10**9, **more: str
    ) -> launch.Job:
        """The next job; one of the same name finds its state."""
        self.jobs += 1
        self.folder.mkdir()
        more = {"TEST_EXPERTS": "24", **more}
        more |= {"TEST_STEPS": str(steps), "TEST_TO": str(self.folder)}
        return start(self.place, processes, self.devices, name or str(self.jobs), _TRAIN, **more)

    def all_died_and_came_back(self) -> None:
        """Processes 2 and 0 are killed, and come back, one after the other."""
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
        check_losses(self.folder, self.alone)

    def stands(self, what: str, number: signal.Signals, **more: str) -> None:
        """A process does not go on after a signal."""
        with self.job(**more) as job:
            self.first_steps(job.workers)
            began = time.monotonic()
            first, victim, *rest = job.workers
            victim.send(number)
            assert victim.finish(HANG_S) == -signal.SIGKILL
            self.note(f"{what} to the end of the process", time.monotonic() - began)
            ended, _ = self.first_steps([first, *rest])
            self.note(f"{what} to the next correct step", ended - began)
        check_losses(self.folder, self.alone)

    def all_start_again(self) -> None:
        """Every process is killed after a commit, and the job is started again."""
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

    def first_steps(self, workers: list[launch.Worker]) -> tuple[float, float]:
        """Waits until these processes have done a step together; the latest end of it, and the
        latest start of a `connect`."""
        ended, connected = [], []
        for worker in workers:
            said = worker.heard(HANG_S)
            while said["devices"] != len(workers) * max(self.devices, 1):
                said = worker.heard(HANG_S)
            ended.append(said["at"])
            connected.append(said["connected"])
        return max(ended), max(connected)

    def note(self, what: str, seconds: float) -> None:
        _say(f"{what}: {seconds:.1f}")
        self.taken_s[what].append(seconds)

    def measure(self, stuck_after_s: int) -> None:
        """Measures each loss once."""
        self.all_died_and_came_back()
        stuck = {"TEST_STUCK_AFTER": str(stuck_after_s)}
        self.stands(f"Python stands, stuck_after_s={stuck_after_s}", signal.SIGUSR1, **stuck)
        self.stands("SIGSTOP", signal.SIGSTOP)
        self.all_start_again()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each process")
    parser.add_argument("--times", type=int, default=TIMES, help="of each loss")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ept-") as name:
        measured = Measurement(Path(name), 0 if options.gpus else 2)
        measured.measure(stuck_after_s=30)  # fills the cache
        measured.taken_s.clear()
        for _ in range(options.times):
            measured.measure(STUCK_AFTER_S)
    _say(f"\nload of the machine: {os.getloadavg()}, {os.cpu_count()} cores\n")
    _say("| seconds | times | min | median | max |\n|---|---|---|---|---|")
    for what, taken in measured.taken_s.items():
        figures = f"{min(taken):.1f} | {statistics.median(taken):.1f} | {max(taken):.1f}"
        _say(f"| {what} | {len(taken)} | {figures} |")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
