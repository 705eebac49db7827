"""The environment for a reader's commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a reader, with `ep-runtime` on the path."""
    program = tmp_path / "bin/ep-runtime"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ep_runtime_client.cli "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path}
