"""Runs programs that check files in other languages; the extra `dev` installs them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def _installed(name: str) -> str | None:
    """Finds a program in the environment that runs the tests, even if it is not on the path."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


SHELLCHECK = _installed("shellcheck")
HADOLINT = _installed("hadolint")
