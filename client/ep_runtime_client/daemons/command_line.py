"""Makes command lines of our programs without importing the programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def python_command(module: str, options: Sequence[str]) -> list[str]:
    """Returns the command line that runs one of our modules in a new process.

    `-P` keeps the current directory off the child's path, so that a checkout in it does not replace
    the installed package. PYTHONPATH and isolated mode keep their effect.
    """
    flags = ["-I"] if sys.flags.isolated else ["-P"]
    return [sys.executable, *flags, "-m", module, *options]
