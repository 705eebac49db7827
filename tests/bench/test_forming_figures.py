"""The figures of groups over nodes can be measured, and stay within their aims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_small_run_prints_every_figure_within_its_aim():
    script = Path(__file__).with_name("forming_figures.py")
    done = subprocess.run(
        [sys.executable, str(script), "3", "1", "2x4"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    figures = {row["what"]: row["worst"] for row in map(json.loads, done.stdout.splitlines())}
    assert figures.pop("last join to READY, 4 ranks on 2 nodes") < 500
    assert figures.pop("SIGKILL of a process to the other node's event") < 2000
    assert figures.pop("RSS of the coordinator with 3 such groups, 4 ranks on 2 nodes") < 150
    assert figures.pop("coordinator answers per rank while forming, 4 ranks on 2 nodes") < 5
    assert figures.pop("SIGKILL of a process to PeerLostError in the last waiting call") < 2000
    assert len(figures) == 2
