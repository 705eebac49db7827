"""Processes killed anywhere in a training step: the others know it, end, and saved no NaN.

The job that starts then is the next one's victim, and finds the memory of the one before.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_fixtures import wait_until
from faults import training_job
from harness import memfds_of
from multiprocess.launch import Job, Worker

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children

KNOWN_S, ENDED_S, FORMED_S = 5.0, 10.0, 2.0
GIVEN_UP_S = 60.0

_SCRIPT = """
from pathlib import Path
jax.config.update("jax_compilation_cache_dir", os.environ["TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from faults import training_job
training_job.train(Path(os.environ["TEST_SAVED"]), say)
"""
_pause = threading.Event()  # never set: waits of a given length


@dataclasses.dataclass(frozen=True)
class Ending:
    """Seconds after the kill until a survivor said PeerLostError, and until it had ended."""

    known_s: float
    ended_s: float
    code: int | None


def _watch(survivors: list[Worker], victim: Worker, killed: float) -> list[Ending]:
    """All at the same time, or one that ends late would hide when the next one knew."""
    known_s = [float("inf")] * len(survivors)
    endings: dict[int, Ending] = {}
    while len(endings) < len(survivors):
        for place, survivor in enumerate(survivors):
            if place in endings:
                continue
            ended, now_s = survivor.ended, time.monotonic() - killed
            if known_s[place] == float("inf"):
                text = survivor.log.read_text(errors="replace")
                if "PeerLostError" in text and str(victim.pid) in text:
                    known_s[place] = now_s
            if ended or now_s > GIVEN_UP_S:
                code = survivor.finish() if ended else None
                endings[place] = Ending(known_s[place], now_s, code)
        _pause.wait(0.02)
    return list(endings.values())


def _formed_s(said: list[dict[str, Any]]) -> float:
    """From the last process's session to the last process's group."""
    return float(max(row["formed"] for row in said) - max(row["connected"] for row in said))


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 4), pytest.param(4, 1, marks=pytest.mark.slow)],
    ids=["2x4", "4x1"],
)
def test_a_kill_in_a_step_ends_the_others_with_its_name_and_saves_no_nan(
    address: str,
    admin: source.Source,
    daemon: children.Child,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
    processes: int,
    devices: int,
) -> None:
    chance, memory = random.Random(dose), set[int]()
    worst = dict.fromkeys(("known", "ended", "formed again"), 0.0)
    saved = tmp_path / "saved"
    saved.mkdir()
    for number in range(dose):
        with Job(
            _SCRIPT,
            processes=processes,
            devices=devices,
            EP_RUNTIME_ADDRESS=address,
            EP_RUNTIME_JOB="training",
            TEST_SAVED=str(saved),
            TEST_CACHE=str(tmp_path / "cache"),
        ) as job:
            said = job.heard()
            assert {row["reattached"] for row in said} == {number > 0}
            memory = memory or memfds_of(daemon.pid)
            assert memfds_of(daemon.pid) == memory  # not a byte is allocated anew
            if number:
                worst["formed again"] = max(worst["formed again"], _formed_s(said))
            # Process 0 has JAX's coordinator; without it JAX ends the others by SIGABRT.
            first = 0 if number % 10 == 1 else chance.randrange(1, processes)
            victim = job.workers.pop(first)
            _pause.wait(chance.uniform(0, 0.5))
            killed = time.monotonic()
            victim.kill()
            endings = _watch(job.workers, victim, killed)
            assert all(ending.code not in (0, None) for ending in endings), (endings, job.tails())
            worst["known"] = max(worst["known"], *(ending.known_s for ending in endings))
            worst["ended"] = max(worst["ended"], *(ending.ended_s for ending in endings))
        assert training_job.is_finite(saved)
        wait_until(lambda: admin.groups()[0]["state"] == "RETAINED", "the group is retained")
        _tell(f"{number + 1} kills of {processes} x {devices}, at worst {worst}")
    for what, seconds in worst.items():
        record_property(f"{processes} x {devices} {what} after, at worst", f"{seconds:.2f} s")
    assert worst["known"] < KNOWN_S
    assert worst["ended"] < ENDED_S
    assert worst["formed again"] < FORMED_S


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
