"""A plugin of pytest: tests load the CPU library that `run.py` built."""

from __future__ import annotations

import os
from pathlib import Path

from ep_runtime import native

_PATH = Path(os.environ["SANITIZED_LIBRARY"])
_where = native.library_path


def _sanitized(platform: str = "cpu") -> Path:
    return _PATH if platform == "cpu" else _where(platform)


native.library_path = _sanitized
native.LIBRARY_PATH = _PATH
