"""`ep-runtime serve`: becomes the daemon, which gets its options as typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ep_runtime_client.daemons import command_line


def run_words(words: Sequence[str]) -> NoReturn:
    """Replaces this process by the daemon, so that signals and systemd's READY reach it."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = command_line.python_command("ep_runtime_server", list(words))
    os.execv(command[0], command)
