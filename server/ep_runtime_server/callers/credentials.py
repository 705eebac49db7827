"""Asks the kernel which process is at the other end of a unix socket."""

from __future__ import annotations

import array
import dataclasses
import errno
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

from ep_runtime.errors import PermissionDeniedError
from ep_runtime.trust import UCRED, ids_of

# From asm-generic/socket.h, because Python 3.11's socket module lacks these names.
SO_PEERGROUPS = 59
SO_PEERPIDFD = 77

# Limit of the characters of an order's reason.
MAX_REASON = 200

# Ancillary bytes for a packet's sender (SO_PASSCRED), without space for descriptors.
SENDER_BYTES = socket.CMSG_SPACE(UCRED.size)


@dataclasses.dataclass
class Peer:
    """The process that connected, with a pidfd that this object owns until `take_pidfd`."""

    pid: int
    uid: int
    gids: frozenset[int]
    pidfd: int

    def take_pidfd(self) -> int:
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.take_pidfd())


@dataclasses.dataclass(frozen=True)
class Caller:
    """The process that connected; pid 0 if its pid namespace hides it."""

    uid: int
    pid: int

    def __str__(self) -> str:
        return f"uid {self.uid} (pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class GivenOrder:
    """An operator's order: its author, the command, and the reason.

    Orders arrive on unix sockets, so they come from the daemon's host.
    """

    caller: Caller
    command: str
    reason: str = ""
    host: str = dataclasses.field(default_factory=socket.gethostname)

    def __str__(self) -> str:
        return f"by {self.caller} with {self.command}{self.note}"

    @property
    def note(self) -> str:
        """Returns the order's host and reason, which messages append to the command."""
        return f" on host {self.host}" + (f": {self.reason}" if self.reason else "")

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event that reports the order."""
        found = {
            "by_uid": self.caller.uid,
            "by_pid": self.caller.pid,
            "by_host": self.host,
            "command": self.command,
        }
        return {**found, "reason": self.reason} if self.reason else found


def caller_of(connection: socket.socket) -> Caller:
    """Reads the caller of an accepted unix socket, whose mode limits who may connect."""
    pid, uid, _ = ids_of(connection)
    return Caller(uid, pid)


def peer_of(connection: socket.socket, *, accepted_s: float, use_peer_pidfd: bool = True) -> Peer:
    """Returns the peer of an accepted SOCK_SEQPACKET or SOCK_STREAM unix socket.

    Args:
        connection: the accepted socket.
        accepted_s: CLOCK_BOOTTIME when the socket was accepted; used by the fallback.
        use_peer_pidfd: False forces the fallback for kernels before 6.5.

    Raises:
        PermissionDeniedError: the process has ended, or its pid namespace is hidden from ours.
        OSError: no file descriptors are left.
    """
    pid, uid, gid = ids_of(connection)
    if pid <= 0:
        raise PermissionDeniedError(
            "the client's process is not visible here; run daemon and client in one pid namespace"
        )
    gids = frozenset({gid, *_supplementary_gids(connection)})
    pidfd = _peer_pidfd(connection) if use_peer_pidfd else None
    if pidfd is None:
        pidfd = _pidfd_by_pid(connection, pid, accepted_s)
    return Peer(pid, uid, gids, pidfd)


def message_pid(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Returns the pid of a packet's sender (SO_PASSCRED); 0 if the kernel gives none."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(UCRED.unpack_from(data)[0])
    return 0


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _supplementary_gids(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4096)
    except OSError:  # over 1024 groups, or a kernel before 4.13: use the primary group
        return ()
    gids = array.array("I")
    gids.frombytes(raw[: len(raw) // 4 * 4])
    return tuple(gids)


def _peer_pidfd(connection: socket.socket) -> int | None:
    """Returns the peer's pidfd; None if the kernel (before 6.5) lacks SO_PEERPIDFD."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno in (92, 22):  # ENOPROTOOPT, EINVAL
            return None
        if error.errno in (3, 61):  # ESRCH, ENODATA: already reaped
            raise PermissionDeniedError("the client's process is gone") from error
        raise
    return int(struct.unpack("i", raw)[0])


def _pidfd_by_pid(connection: socket.socket, pid: int, accepted_s: float) -> int:
    """Opens a pidfd by pid, and checks that the pid was not reused since the connect."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise PermissionDeniedError("the client's process is gone", pid=pid) from error
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    hung_up = any(events & select.POLLHUP for _, events in poller.poll(0))
    started_s = process_start_s(pid)
    if hung_up or started_s is None or started_s > accepted_s:
        os.close(pidfd)
        raise PermissionDeniedError("the client's process is gone", pid=pid)
    return pidfd


def process_start_s(pid: int) -> float | None:
    """Returns when a process started, on CLOCK_BOOTTIME; None if the process has ended."""
    fields = _stat(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else None


def process_state(pid: int) -> str:
    """Returns the kernel's state letter, such as "T" for stopped; "" for an ended process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on; empty if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The process's name may contain parentheses, so count fields from the last one.
    return stat.rpartition(")")[2].split()


def open_process(pid: int, start_s: float | None) -> int | None:
    """Opens a pidfd of the process with this pid and start time; None if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except OverflowError:
        return None
    except OSError as error:
        # The pid is free, or is now a thread's id.
        if error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise
        return None
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    # The pid may have been reused, so compare the start time; an ended process does not count.
    if start_s is None or process_start_s(pid) != start_s or poller.poll(0):
        os.close(pidfd)
        return None
    return pidfd
