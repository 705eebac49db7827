"""Runs programs that hang if a wait depends on the order of calls, each in a separate process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from child_programs import run_to_end
from programs import PROGRAMS

LIMIT_S = 90
# Programs that once needed the threads of several cores. On one core the others end like these; -m
# slow runs them.
SLOW_ON_ONE_CORE = ("launches200", "independent30")
ON_ONE_CORE = ("microbatches4", "psum50", "overflow20")


def run(name: str, *prefix: str) -> None:
    """Runs a program; fails with its output unless the program ends with 0 in time."""
    words = [*prefix, sys.executable, "programs.py", name]
    done = run_to_end(*words, cwd=Path(__file__).parent, limit_s=LIMIT_S)
    assert done.stdout.endswith("done\n")


@pytest.mark.deadlock
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_ends_with_the_right_values(name):
    run(name)


@pytest.mark.deadlock
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
@pytest.mark.parametrize(
    "name",
    [*ON_ONE_CORE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ON_ONE_CORE)],
)
def test_program_ends_on_one_core(name):
    run(name, "taskset", "-c", str(min(os.sched_getaffinity(0))))
