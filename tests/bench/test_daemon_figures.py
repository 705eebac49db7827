"""The daemon's figures can be measured, and stay within their aims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_small_run_prints_every_figure_within_its_aim():
    script = Path(__file__).with_name("daemon_figures.py")
    done = subprocess.run(
        [sys.executable, str(script), "3", "2", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    figures = {row["what"]: row["worst"] for row in map(json.loads, done.stdout.splitlines())}
    assert figures.pop("RSS of the daemon, 3 clients") < 150
    assert figures.pop("SIGKILL of a process to PEER_LOST on the board") < 100
    assert figures.pop("SIGKILL of a process to the survivors' event") < 2000
    assert figures.pop("SIGKILL of the daemon to SERVING, 8 processes came back") < 5
    assert len(figures) == 5
