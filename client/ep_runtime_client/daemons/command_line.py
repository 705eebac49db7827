"""Makes command lines of our programs without importing these."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def python_command(module: str, options: Sequence[str]) -> list[str]:
    """The command line of a module of ours in a process of its own.

    `-P` keeps the current directory off the child's path: a checkout that the user happens to
    stand in must not take the place of the installed package. PYTHONPATH still counts, and so
    does isolated mode.
    """
    flags = ["-I"] if sys.flags.isolated else ["-P"]
    return [sys.executable, *flags, "-m", module, *options]
