"""Processes killed anywhere in a training step: the others know it, end, and saved no NaN."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from faults import training_job
from multiprocess.launch import Job, Worker

KNOWN_S, ENDED_S = 5.0, 10.0
KILLS = int(os.environ.get("TEST_KILLS", "200"))
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


def _watch(survivor: Worker, victim: Worker, killed: float) -> Ending:
    known_s = float("inf")
    while True:
        ended, now_s = survivor.ended, time.monotonic() - killed
        if known_s == float("inf"):
            text = survivor.log.read_text(errors="replace")
            if "PeerLostError" in text and str(victim.pid) in text:
                known_s = now_s
        if ended or now_s > GIVEN_UP_S:
            return Ending(known_s, now_s, survivor.finish() if ended else None)
        _pause.wait(0.02)


def _kill_one(
    address: str, folder: Path, delay_s: float, victim: int, processes: int = 2, devices: int = 4
) -> list[Ending]:
    """Kills a process of a job at a random moment of a step; how the others end."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    with Job(
        _SCRIPT,
        processes=processes,
        devices=devices,
        EP_RUNTIME_ADDRESS=address,
        EP_RUNTIME_JOB="training",
        TEST_SAVED=str(saved),
        TEST_CACHE=str(folder / "cache"),
    ) as job:
        assert job.heard() == [{"stepping": True}] * processes
        dying = job.workers.pop(victim)
        _pause.wait(delay_s)
        killed = time.monotonic()
        dying.kill()
        endings = [_watch(worker, dying, killed) for worker in job.workers]
        assert all(ending.code not in (0, None) for ending in endings), (endings, job.tails())
    assert training_job.is_finite(saved)
    return endings


@pytest.mark.timeout(36000)
@pytest.mark.parametrize("kills", [2, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_a_kill_in_a_step_ends_the_others_with_its_name_and_saves_no_nan(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int
) -> None:
    chance, endings = random.Random(kills), list[Ending]()
    for number in range(kills):
        # Process 0 has JAX's coordinator; without it JAX ends the others by SIGABRT.
        victim = 0 if number % 10 == 1 else 1
        endings += _kill_one(address, tmp_path, chance.uniform(0, 0.5), victim)
        known_s = max(ending.known_s for ending in endings)
        ended_s = max(ending.ended_s for ending in endings)
        if kills > 2:
            with capsys.disabled():
                sys.stdout.write(
                    f"\n{number + 1} kills: known in {known_s:.2f} s, ended in {ended_s:.2f} s; "
                    f"this one {endings[-1]}"
                )
                sys.stdout.flush()
    assert known_s < KNOWN_S
    assert ended_s < ENDED_S
