"""Daemons that this process starts, with the same interpreter and packages, and bounded waits."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ep_runtime import env, wire
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client.daemons import command_line, transport
from ep_runtime_client.daemons.addresses import SocketDirectory, path_of

_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 64 << 10
_MAX_CORES = 8192  # the most that Linux supports


class Child:
    """A daemon process that we started, its directory and its log."""

    def __init__(
        self, directory: Path, process: subprocess.Popen[bytes], ready: int, log: IO[bytes]
    ) -> None:
        self.directory = directory
        self._process = process
        self._ready = ready
        self._log = log
        self._tail = b""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @classmethod
    def start(
        cls,
        directory: Path,
        options: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        log: IO[bytes] | None = None,
    ) -> Child:
        """Starts a daemon on `directory` and returns at once; `wait_ready` waits for it.

        The daemon may outlive this process and serve others. So it has its own session,
        environment, directory and cores: neither Ctrl-C in our terminal nor a binding of this
        process to a GPU or a core affects it. It inherits our limits (`ulimit`, nice).

        Args:
            directory: its socket directory; must exist.
            options: more options of `ep-runtime serve`.
            pass_fds: descriptors that appear in the options.
            log: file for its log, closed by the Child; None for a file without a name.
        """
        ready, told = os.pipe()
        command = command_line.python_command(
            "ep_runtime_server", ["--dir", str(directory), "--ready-fd", str(told), *options]
        )
        log = tempfile.TemporaryFile() if log is None else log  # noqa: SIM115 - lives as long as the child
        try:
            with _on_all_cores():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env.daemon_environment(),
                    cwd="/",
                    pass_fds=(told, *pass_fds),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ready)
            log.close()
            raise
        finally:
            os.close(told)
        return cls(directory, process, ready, log)

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the daemon reports that its sockets answer.

        Raises:
            RuntimeUnavailableError: the daemon ended, or did not report within `timeout_s`; the
                text has the end of its log.
        """
        poll = select.poll()  # select() rejects descriptors above 1023
        poll.register(self._ready, select.POLLIN)
        readable = poll.poll(timeout_s * 1000)
        told = os.read(self._ready, 4096) if readable else b""
        os.close(self._ready)
        if told:
            return
        code = self.stop()
        reason = f"it ended with exit code {code}" if readable else f"no word in {timeout_s:g} s"
        raise self._failed(reason)

    def _failed(self, reason: str) -> RuntimeUnavailableError:
        return RuntimeUnavailableError(
            f"the daemon started for {self.directory} is not there: {reason}\n{self.log_tail()}",
            address=f"unix://{self.directory}",
        )

    def log_tail(self, lines: int = 15) -> str:
        """Returns the last lines of the daemon's log; after `stop`, the lines at that time."""
        if not self._log.closed:
            size = os.fstat(self._log.fileno()).st_size
            start = max(0, size - _LOG_TAIL_BYTES)
            self._tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, start)
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """Ends the daemon and returns its exit code; kills it if it does not end in time."""
        with self._lock:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self.log_tail()
            self._log.close()
            return int(self._process.returncode)


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """Lets processes that this thread starts in the block run on every core of our cgroup."""
    ours = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, range(_MAX_CORES))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, ours)


def answers(place: SocketDirectory, timeout_s: float) -> bool:
    """Whether a daemon listens on both of the directory's sockets.

    Raises:
        PermissionDeniedError: another user could listen there.
    """
    try:
        pinned = place.open()
    except RuntimeUnavailableError:
        return False
    try:
        if not os.path.exists(path_of(pinned, wire.API_SOCKET)):
            return False
    finally:
        os.close(pinned)
    try:
        with transport.fd_socket(place, timeout_s):
            return True
    except RuntimeUnavailableError:
        return False


def remove_directory(directory: Path) -> None:
    """Removes a private socket directory, if the daemon did not remove it when it ended."""
    shutil.rmtree(directory, ignore_errors=True)
