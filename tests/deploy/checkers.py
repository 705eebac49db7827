"""Programs that check files of others' languages; the extra `dev` brings them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def _installed(name: str) -> str | None:
    """In the environment that runs the tests, whether or not that is on the path."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


SHELLCHECK = _installed("shellcheck")
HADOLINT = _installed("hadolint")
