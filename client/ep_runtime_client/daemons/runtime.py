"""Finds the daemon at an address, and starts one if the address asks for that."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ep_runtime import env, files
from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_client.base import jax_state
from ep_runtime_client.daemons import children, transport
from ep_runtime_client.daemons.addresses import EMBEDDED, NODE, NONE, Address, SocketDirectory

_log = logging.getLogger("ep_runtime")

# A node's daemon outlives its last client by this time: a job's processes end one after the other,
# and the next one may have found the daemon but not said hello yet.
_IDLE_EXIT_S = 5


@dataclasses.dataclass
class ReachedRuntime:
    """A daemon that answers, or none; `child` is set if this process started it."""

    address: Address
    place: SocketDirectory | None
    child: children.Child | None = None

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
            children.remove_directory(self.child.directory)


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
        children.remove_directory(directory)
        raise
    _log.info("started a private daemon, pid %d, that ends with this process", child.pid)
    # The name's random part makes the directory ours, so the parents of TMPDIR do not matter.
    return ReachedRuntime(address, SocketDirectory(directory, os.geteuid()), child)


def _start_with_lifeline(directory: Path) -> children.Child:
    """Starts a daemon that watches our pidfd, so that it ends with this process even on SIGKILL.

    Not PR_SET_PDEATHSIG, which follows the thread that started the child, not the process.
    """
    ourselves = os.pidfd_open(os.getpid())
    try:
        options = ["--parent-pidfd", str(ourselves), "--drain-s", "0"]
        return children.Child.start(directory, options, pass_fds=[ourselves])
    finally:
        os.close(ourselves)


def _open_node(address: Address, directory: Path, timeout_s: float) -> ReachedRuntime:
    """Starts the node's daemon, under a lock, if none runs; it ends after its last process."""
    place = SocketDirectory(directory)
    place.check()
    env.make_directory(directory)
    with locked(directory / "start.lock", timeout_s):
        if children.answers(place, timeout_s):
            return ReachedRuntime(address, place)
        child = children.Child.start(
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
            f"cannot start the node's daemon with {path}: {error.strerror}; remove it",
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
                        f"{timeout_s:g} s; it holds {path}",
                        address="node",
                    ) from error
                pause.wait(0.02)
        yield
