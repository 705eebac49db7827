"""The figures of scale can be measured, and grow no faster than what they are of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def figures(*words: str, script: str = "scale_figures.py") -> dict[str, float]:
    """By what they are of, of a process that does nothing else."""
    script = str(Path(__file__).with_name(script))
    done = subprocess.run(
        [sys.executable, script, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, done.stdout.splitlines())
    return {row["what"].partition(",")[0]: row["p50"] for row in rows}


def test_nodes_form_lose_members_and_form_again_with_few_calls() -> None:
    found = figures("cluster", "48", "1")
    assert found["calls to the coordinator per rank: form"] < 1.0
    assert found["calls to the coordinator per rank: form again"] < 1.0
    assert found["form"] < 10.0


def test_hours_of_a_daemon_leave_nothing() -> None:
    found = figures("2", script="simulated_day.py")
    assert found["descriptors grown from hour 1 to 2"] == 0
    assert found["threads grown from hour 1 to 2"] == 0
    # Events that the log keeps, and no more: 9 for each process of that hour.
    assert found["objects grown from hour 1 to 2"] < 60 * 10
    assert found["journal after each of 2 hours"] < 1.5  # MiB; it is written anew at one


def test_sessions_and_layers() -> None:
    found = figures("sessions", "40", "3")
    assert found["heartbeats of 40 sessions"] < 100
    found = figures("layers", "1000")
    assert found["1000 layers registered"] < 5
