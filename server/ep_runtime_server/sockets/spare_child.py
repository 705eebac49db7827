"""A process that handles others' descriptors; if it hangs, a new one replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

from ep_runtime import env

END_S = 1.0


class SpareChild:
    """`python SCRIPT FD`, started when it is first needed. Lives on the event loop's thread.

    Attributes:
        inbox: the other end of its socket FD, which never waits; None while no process runs.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self.inbox: socket.socket | None = None

    def start(self) -> socket.socket:
        """Returns the process's inbox, and starts the process if none runs. Raises OSError."""
        if self.inbox is None:
            self._killed = [process for process in self._killed if process.poll() is None]
            self._process, self.inbox = _started(self._script)
        return self.inbox

    def end(self) -> subprocess.Popen[bytes] | None:
        """Kills the process, which may hang; the next one goes on."""
        process, self._process = self._process, None
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None
        if process is not None:
            process.kill()
            self._killed.append(process)
        return process

    async def close(self) -> None:
        """Ends the processes; leaves those that outlive END_S to init."""
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
