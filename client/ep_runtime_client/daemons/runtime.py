"""Finds the daemon at an address, and starts one if the address asks for that.

Daemons that it starts have the same interpreter and packages as this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ep_runtime import env, files, wire
from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_client.base import jax_state
from ep_runtime_client.daemons import command_line, transport
from ep_runtime_client.daemons.addresses import (
    EMBEDDED,
    NODE,
    NONE,
    Address,
    SocketDirectory,
    path_of,
)

_log = logging.getLogger("ep_runtime")
# A node's daemon outlives its last client by this time, because a job's processes end one after
# another, and the next process may have found the daemon but not said hello yet.
_IDLE_EXIT_S = 5


@dataclasses.dataclass
class ReachedRuntime:
    """A daemon that answers, or none; `child` is set if this process started it."""

    address: Address
    place: SocketDirectory | None
    child: Child | None = None

    @property
    def directory(self) -> Path | None:
        return self.place.directory if self.place is not None else None

    @property
    def has_daemon(self) -> bool:
        return self.place is not None

    @property
    def is_private(self) -> bool:
        """Whether the daemon ends with this process, so that it cannot retain memory."""
        return self.address.kind in (EMBEDDED, NONE)

    def revive(self, timeout_s: float) -> None:
        """Restarts a private daemon that crashed, or the node's.

        A daemon at an address is restarted by systemd, or by the user who ran `ep-runtime serve`.

        Raises:
            RuntimeUnavailableError: the daemon does not come up.
        """
        crashed = self.child is not None and self.child.ended and self.child.stop() != 0
        if crashed and self.address.kind == EMBEDDED and self.directory is not None:
            self.child = _start_with_lifeline(self.directory)
            self.child.wait_ready(timeout_s)
        if self.address.kind == NODE and self.directory is not None:
            self.child = _open_node(self.address, self.directory, timeout_s).child or self.child

    def stop(self) -> None:
        """Ends a private daemon and removes its directory."""
        if self.child is not None and self.address.kind == EMBEDDED:
            self.child.stop()
            remove_directory(self.child.directory)


def open_runtime(address: Address, timeout_s: float) -> ReachedRuntime:
    """Opens the daemon at an address, and starts it if the address asks for that.

    Raises:
        RuntimeUnavailableError: no daemon answers, or a started one does not come up.
        PermissionDeniedError: another user could answer there.
        InvalidArgumentError: an embedded daemon in a job of several processes.
    """
    if address.kind == NONE:
        return ReachedRuntime(address, None)
    if address.kind == EMBEDDED:
        return _open_embedded(address, timeout_s)
    assert address.directory is not None  # only NONE and EMBEDDED have none
    if address.kind == NODE:
        return _open_node(address, address.directory, timeout_s)
    place = SocketDirectory(address.directory, address.uid)
    with transport.fd_socket(place, timeout_s):
        return ReachedRuntime(address, place)


def _open_embedded(address: Address, timeout_s: float) -> ReachedRuntime:
    processes = jax_state.num_processes()
    if processes > 1:
        raise InvalidArgumentError(
            f"an embedded daemon serves one process, this job has {processes}; leave the address "
            'out, or pass address="node", in every process',
            argument="address",
            num_processes=processes,
        )
    directory = env.private_directory()
    try:
        child = _start_with_lifeline(directory)
        child.wait_ready(timeout_s)
    except BaseException:
        remove_directory(directory)
        raise
    _log.info("started a private daemon, pid %d, that ends with this process", child.pid)
    # The name's random part makes the directory ours, so the parents of TMPDIR do not matter.
    return ReachedRuntime(address, SocketDirectory(directory, os.geteuid()), child)


def _start_with_lifeline(directory: Path) -> Child:
    """Starts a daemon that watches our pidfd, so that it ends with this process even on SIGKILL.

    Not PR_SET_PDEATHSIG, which follows the thread that started the child, not the process.
    """
    ourselves = os.pidfd_open(os.getpid())
    try:
        options = ["--parent-pidfd", str(ourselves), "--drain-s", "0"]
        return Child.start(directory, options, pass_fds=[ourselves])
    finally:
        os.close(ourselves)


def _open_node(address: Address, directory: Path, timeout_s: float) -> ReachedRuntime:
    """Starts the node's daemon, under a lock, if none runs; it ends after its last process."""
    place = SocketDirectory(directory)
    place.check()
    env.make_directory(directory)
    with locked(directory / "start.lock", timeout_s):
        if answers(place, timeout_s):
            return ReachedRuntime(address, place)
        child = Child.start(
            directory, ["--idle-exit-s", str(_IDLE_EXIT_S)], log=own_file(directory / "daemon.log")
        )
        child.wait_ready(timeout_s)
    _log.info("started the node's daemon, pid %d, at unix://%s", child.pid, directory)
    return ReachedRuntime(address, place, child)


def own_file(path: Path) -> IO[bytes]:
    """Opens a file of the node's directory to append to. Raises RuntimeUnavailableError."""
    try:
        return open(files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "a+b")
    except OSError as error:
        raise RuntimeUnavailableError(
            f"cannot start the node's daemon with {path}: {error.strerror}; remove that file",
            address="node",
        ) from error


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds an flock, which the kernel releases if the holder dies.

    Raises:
        RuntimeUnavailableError: another process holds it for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    with own_file(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise RuntimeUnavailableError(
                        f"another process has been starting the node's daemon for more than "
                        f"{timeout_s:g} s; that process locks {path}",
                        address="node",
                    ) from error
                pause.wait(0.02)
        yield


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
