"""Ends the processes that tests started, once the tests' own process has ended in any way.

One small process of ours holds a pidfd of each; the end of its standard input tells it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading

_WATCH = """
import contextlib, os, select, signal
poll, held = select.poll(), set()
poll.register(0, select.POLLIN)
text = b""
while True:
    for fd, _ in poll.poll():
        if fd:  # ended by itself
            poll.unregister(fd)
            os.close(fd)
            held.remove(fd)
            continue
        part = os.read(0, 4096)
        if not part:
            for pidfd in held:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise SystemExit
        *lines, text = (text + part).split(b"\\n")
        for line in lines:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(int(line))
                held.add(pidfd)
                poll.register(pidfd, select.POLLIN)
"""

_lock = threading.Lock()


@functools.cache
def _guardian(owner: int) -> int:
    """The descriptor at which the guardian of the process `owner`, which is us, listens."""
    theirs, ours = os.pipe()
    # No Popen: at our end it would warn about a process that must outlive us.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", _WATCH],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, theirs, 0)],
        setsid=True,  # Ctrl-C at the terminal ends the tests, and then it has work to do
    )
    os.close(theirs)
    return ours


def protect(pid: int) -> None:
    """The process of `pid`, a child of ours, ends with us at the latest."""
    with _lock:
        os.write(_guardian(os.getpid()), f"{pid}\n".encode())
