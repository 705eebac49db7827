"""Runs of a script that trains another project's model and prints its losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import doc_pages
from daemon_fixtures import package_path


def losses(*words: str, steps: int, timeout_s: float, **environment: str) -> list[float]:
    """Every step's loss, which `python *words` prints last."""
    found: list[float] = last_line(*words, timeout_s=timeout_s, **environment)
    assert len(found) == steps
    return found


def last_line(*words: str, timeout_s: float, **environment: str) -> Any:
    """The JSON that `python *words` prints last, in a process of its own on CPU."""
    done = subprocess.run(
        [sys.executable, *words],
        env={
            **os.environ,
            "PYTHONPATH": f"{doc_pages.ROOT / 'tests'}:{package_path()}",
            "JAX_PLATFORMS": "cpu",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
