"""Kills of a process anywhere in a training step, one job after the other on the same memory."""

from __future__ import annotations

import dataclasses
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from daemon_fixtures import wait_until
from faults import training_job
from multiprocess.launch import Job, Worker

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
    """Where the jobs run.

    Attributes:
        job: starts one, whose processes run SCRIPT, with more variables of the environment; all
            jobs have one EP_RUNTIME_JOB.
        memory: what the daemons hold for it, as is to be the same in every job.
        states: of its group, on every daemon.
        folder: for what the jobs save.
        name: in what is told.
        apart: they are on two nodes, where JAX may end who outlives process 0 before the news.
    """

    job: Callable[..., Job]
    memory: Callable[[], object]
    states: Callable[[], Sequence[str]]
    folder: Path
    name: str
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """Of a survivor.

    Attributes:
        known_s, ended_s: seconds after the kill until it said PeerLostError, and until its end.
        code: of its end; None where it went on.
    """

    known_s: float
    ended_s: float
    code: int | None

    def by_jax(self, victim: int) -> bool:
        """Whether JAX, whose coordinator process 0 has, ended it before it knew."""
        return victim == 0 and self.code == -signal.SIGABRT and self.known_s == float("inf")


def kill_in_steps(place: Place, kills: int, chance: random.Random) -> dict[str, float]:
    """Kills a process of `kills` jobs: the worst seconds until it is known, ... by what they are.

    Raises:
        AssertionError: a survivor ended with 0, memory is another, or a NaN was saved.
    """
    worst = dict.fromkeys(("known", "ended", "formed again"), 0.0)
    memory: object = None
    saved = place.folder / "saved"
    saved.mkdir()
    more = {"TEST_SAVED": str(saved), "TEST_CACHE": str(place.folder / "cache")}
    for number in range(kills):
        with place.job(SCRIPT, **more) as job:
            said = job.heard()
            assert {row["reattached"] for row in said} == {number > 0}
            memory = memory or place.memory()
            assert memory
            assert place.memory() == memory  # not a byte is allocated anew
            if number:
                worst["formed again"] = max(worst["formed again"], _formed_s(said))
            first, endings = _kill_one(job, number, chance)
            known_s = [
                ending.known_s for ending in endings if not (place.apart and ending.by_jax(first))
            ]
            worst["known"] = max([worst["known"], *known_s])
            worst["ended"] = max(worst["ended"], *(ending.ended_s for ending in endings))
        assert training_job.is_finite(saved)
        wait_until(lambda: set(place.states()) == {"RETAINED"}, "the group is retained")
        _tell(
            f"{number + 1} kills of {place.name}, of process {first}: {endings}; at worst {worst}"
        )
    return worst


def check(
    worst: dict[str, float],
    name: str,
    record: Callable[[str, object], None],
    *,
    formed_s: float = FORMED_S,
) -> None:
    """Tells the figures of a place, and holds them against the limits."""
    for what, seconds in worst.items():
        record(f"{name} {what} after, at worst", f"{seconds:.2f} s")
    assert worst["known"] < KNOWN_S
    assert worst["ended"] < ENDED_S
    assert worst["formed again"] < formed_s


def _kill_one(job: Job, number: int, chance: random.Random) -> tuple[int, list[Ending]]:
    """Which process was killed, and what became of the others.

    Process 0 has JAX's coordinator: without it JAX ends the others by SIGABRT.
    """
    first = 0 if number % 10 == 1 else chance.randrange(1, job.processes)
    victim = job.workers.pop(first)
    _pause.wait(chance.uniform(0, 0.5))
    killed = time.monotonic()
    victim.kill()
    endings = _watch(job.workers, victim, killed)
    assert all(ending.code not in (0, None) for ending in endings), (endings, job.tails())
    return first, endings


def _watch(survivors: list[Worker], victim: Worker, killed: float) -> list[Ending]:
    """All at the same time, or one that ends late would hide when the next one knew."""
    names = str(victim.pid), f"the process of rank {victim.index}, on another node,"
    known_s = [float("inf")] * len(survivors)
    endings: dict[int, Ending] = {}
    while len(endings) < len(survivors):
        for place, survivor in enumerate(survivors):
            if place in endings:
                continue
            ended, now_s = survivor.ended, time.monotonic() - killed
            if known_s[place] == float("inf"):
                text = survivor.log.read_text(errors="replace")
                if "PeerLostError" in text and any(name in text for name in names):
                    known_s[place] = now_s
            if ended or now_s > GIVEN_UP_S:
                code = survivor.finish() if ended else None
                endings[place] = Ending(known_s[place], now_s, code)
        _pause.wait(0.02)
    return list(endings.values())


def _formed_s(said: list[dict[str, Any]]) -> float:
    """From the last process's session to the last process's group."""
    return float(max(row["formed"] for row in said) - max(row["connected"] for row in said))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
