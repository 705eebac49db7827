"""Faults anywhere in a training step, for one job after another on the same memory."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from daemon_fixtures import wait_until
from faults import training_job
from multiprocess.launch import Job, Worker

from ep_runtime_client.cli.daemon import source

KNOWN_S, ENDED_S, FORMED_S = 5.0, 10.0, 2.0
GIVEN_UP_S = 60.0

# TEST_SETTINGS: more arguments of create_group.
SCRIPT = """
from pathlib import Path
jax.config.update("jax_compilation_cache_dir", os.environ["TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from faults import training_job
settings = json.loads(os.environ.get("TEST_SETTINGS", "{}"))
training_job.train(Path(os.environ["TEST_SAVED"]), say, **settings)
"""
_pause = threading.Event()  # never set: waits of a given length


@dataclasses.dataclass(frozen=True)
class Place:
    """The jobs of one kind, with their memory, states and folder.

    Attributes:
        job: starts one, whose processes run SCRIPT, with more variables of the environment; all
            jobs have one EP_RUNTIME_JOB.
        memory: what the daemons hold for it, as is to be the same in every job.
        states: of its group, on every daemon.
        folder: for what the jobs save.
        name: in what is told.
        apart: they are on two nodes or share GPUs with other jobs. There JAX may end who outlives
            process 0 before the news.
    """

    job: Callable[..., Job]
    memory: Callable[[], object]
    states: Callable[[], Sequence[str]]
    folder: Path
    name: str
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Struck:
    """Results of one fault.

    Attributes:
        first: the process that it hit.
        wanted: by process, a pattern of what its log must say.
        at_s: when, on the monotonic clock.
        retained: its memory waits for the next job.
    """

    first: int
    wanted: dict[int, str]
    at_s: float
    retained: bool = True


# Brings fault `number` to a job: (job, number, chance).
Fault = Callable[[Job, int, random.Random], Struck]


@dataclasses.dataclass(frozen=True)
class Ending:
    """Times measured by a process that survived the fault.

    Attributes:
        known_s, ended_s: seconds after the fault until it said the right error, and until its end.
        code: of its end; None where it went on.
    """

    known_s: float
    ended_s: float
    code: int | None

    def by_jax(self, victim: int) -> bool:
        """Whether JAX's coordinator in process 0 took this process down before it noticed the
        fault.
        """
        return victim == 0 and self.code == -signal.SIGABRT and self.known_s == float("inf")


def kill(job: Job, number: int, chance: random.Random) -> Struck:
    """Sends SIGKILL to a process.

    Process 0 has JAX's coordinator: without it JAX ends the others by SIGABRT.
    """
    first = 0 if number % 10 == 1 else chance.randrange(1, job.processes)
    victim = job.workers.pop(first)
    at_s = time.monotonic()
    victim.kill()
    names = f"({victim.pid}|the process of rank {first}, on another node,)"
    wanted = f"PeerLostError.*{names}"
    return Struck(first, dict.fromkeys((worker.index for worker in job.workers), wanted), at_s)


def order(name: str, admin: source.Source) -> Fault:
    """An operator's "reclaim" of the group, or "fence" of a process; every other one after a drain,
    and every third one while a process is stopped."""
    who = rf"by uid {os.getuid()} \(pid {os.getpid()}\) with ep-runtime {name}"

    def strike(job: Job, number: int, chance: random.Random) -> Struck:
        first = chance.randrange(job.processes)
        victim = job.workers[first]
        stopped = job.workers[chance.randrange(job.processes)] if number % 3 == 2 else None
        if number % 2:
            admin.drain(60.0, shutdown=False)
        if stopped is not None:
            stopped.send(signal.SIGSTOP)
            _pause.wait(0.1)
        at_s = time.monotonic()
        wanted = rf"StaleHandleError.*group '?training'?.* was reclaimed {who}"
        every = dict.fromkeys(range(job.processes), wanted)
        if name == "fence":
            (session,) = [row for row in admin.sessions() if row["pid"] == victim.pid]
            admin.fence(session["session_id"], "drill")
            process = rf"rank \d+ \(pid {victim.pid}, job '?training'?\)"
            every = dict.fromkeys(every, rf"PeerLostError.*session of {process} was fenced {who}")
            every[first] = rf"SessionFencedError.*was fenced {who}"
        else:
            admin.reclaim("training", job="", uid=None, all_retained=False)
        if stopped is not None:
            stopped.send(signal.SIGCONT)
        return Struck(first, every, at_s, retained=name == "fence")

    return strike


def strike_in_steps(
    place: Place, strikes: int, chance: random.Random, fault: Fault = kill, *, since: int = 0
) -> dict[str, list[float]]:
    """Brings the fault to `strikes` jobs; returns seconds until processes know it, by kind.

    Faults are numbered from `since`.

    Raises:
        AssertionError: a process ended with 0, memory is another, or a NaN was saved.
    """
    took: dict[str, list[float]] = {"known": [], "ended": [], "formed again": []}
    memory: object = None
    saved = place.folder / "saved"
    saved.mkdir(exist_ok=True)
    more = {"TEST_SAVED": str(saved), "TEST_CACHE": str(place.folder / "cache")}
    for number in range(since, since + strikes):
        with place.job(SCRIPT, **more) as job:
            said = job.heard()
            assert {row["reattached"] for row in said} == {number > since}
            memory = memory or place.memory()
            assert memory
            assert place.memory() == memory  # no byte is newly allocated
            if number > since:
                took["formed again"].append(_formed_s(said))
            _pause.wait(chance.uniform(0, 0.5))
            struck = fault(job, number, chance)
            endings = _watch(job.workers, struck)
            assert all(ending.code not in (0, None) for ending in endings), (endings, job.tails())
            took["known"] += [
                ending.known_s
                for ending in endings
                if not (place.apart and ending.by_jax(struck.first))
            ]
            took["ended"] += [ending.ended_s for ending in endings]
            if float("inf") in took["known"]:
                raise AssertionError(f"not said: {struck.wanted}\n{job.tails()}")
        assert training_job.is_finite(saved)
        left = {"RETAINED"} if struck.retained else set()
        wait_until(lambda left=left: set(place.states()) == left, "the group's end")  # type: ignore[misc]
        worst = {what: max(seconds, default=0.0) for what, seconds in took.items()}
        _tell(f"fault {number} of {place.name}, process {struck.first}: {endings}; worst {worst}")
    return took


def check(
    took: dict[str, list[float]],
    name: str,
    record: Callable[[str, object], None],
    *,
    formed_s: float = FORMED_S,
) -> None:
    """Prints the figures of a place, and compares them with the limits."""
    limits = {"known": KNOWN_S, "ended": ENDED_S, "formed again": formed_s}
    for what, seconds in took.items():
        worst, median = max(seconds, default=0.0), statistics.median(seconds or [0.0])
        record(f"{name} {what} after, at worst", f"{worst:.2f} s")
        record(f"{name} {what} after, median", f"{median:.2f} s")
        assert worst < limits[what], (what, seconds)


def _watch(workers: list[Worker], struck: Struck) -> list[Ending]:
    """Waits for all processes at the same time, or a late one would hide when others knew."""
    known_s = [float("inf")] * len(workers)
    endings: dict[int, Ending] = {}
    while len(endings) < len(workers):
        for place, worker in enumerate(workers):
            if place in endings:
                continue
            ended, now_s = worker.ended, time.monotonic() - struck.at_s
            if known_s[place] == float("inf"):
                text = worker.log.read_text(errors="replace")
                if re.search(struck.wanted[worker.index], text):
                    known_s[place] = now_s
            if ended or now_s > GIVEN_UP_S:
                code = worker.finish() if ended else None
                endings[place] = Ending(known_s[place], now_s, code)
        _pause.wait(0.02)
    return list(endings.values())


def _formed_s(said: list[dict[str, Any]]) -> float:
    """Returns seconds from the last process's session to the last process's group."""
    return float(max(row["formed"] for row in said) - max(row["connected"] for row in said))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
