"""Programs that hang where a wait depends on the order of calls: each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 90
# The ones that once needed several cores' worth of threads to get through.
# On one core the others end as those do; -m slow runs them.
SLOW_ON_ONE_CORE = ("launches200", "independent30")
ON_ONE_CORE = ("microbatches4", "psum50", "overflow20")


def run(name: str, *prefix: str) -> None:
    """Runs a program; fails with its output unless it ends well in time."""
    roots = [ROOT, ROOT / "server", ROOT / "client", ROOT / "tests"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, roots)))
    done = subprocess.run(
        [*prefix, sys.executable, "programs.py", name],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
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
