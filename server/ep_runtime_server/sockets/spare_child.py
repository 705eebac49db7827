"""A process that handles clients' descriptors; if it hangs, a new one replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

from ep_runtime import env

END_S = 1.0


class SpareChild:
    """Runs `python SCRIPT FD`, started on first use. For the event loop's thread.

    Attributes:
        inbox: the non-blocking other end of the socket FD; None while no process runs.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self.inbox: socket.socket | None = None

    def start(self) -> socket.socket:
        """Starts the process if none runs, and returns its inbox. Raises OSError."""
        if self.inbox is None:
            self._killed = [process for process in self._killed if process.poll() is None]
            self._process, self.inbox = _started(self._script)
        return self.inbox

    def end(self) -> subprocess.Popen[bytes] | None:
        """Kills the process, and returns it because it may hang; `start` starts the next one."""
        process, self._process = self._process, None
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None
        if process is not None:
            process.kill()
            self._killed.append(process)
        return process

    async def close(self) -> None:
        """Kills the processes; leaves those that still run after END_S to init."""
        self.end()
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, END_S)


def _started(script: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=env.daemon_environment(),
            )
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours
