"""Limits and current use of each user's sessions, groups, memory and descriptors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime.text import iec
from ep_runtime_server.base import open_files

DEFAULT_RETAIN_S = 24 * 3600.0

# Per api.sock connection: the accepted socket, and both ends of its connection to gRPC's socket.
API_CONNECTION_FDS = 3
# Per session: its pidfd, a connection to api.sock, and one to fd.sock.
SESSION_FDS = 1 + API_CONNECTION_FDS + 1


@dataclasses.dataclass(frozen=True)
class UserLimits:
    """Limits of each user, including the daemon's user.

    Args:
        sessions: sessions that have not ended.
        groups: groups in any state except CLOSED.
        layers: registered layers and stacks, of all groups together.
        host_bytes: bytes of windows and boards in host memory.
        gpu_bytes: bytes of windows on one GPU; None for the daemon's limit there, or for half of
            this limit if `shared`.
        fds: descriptors that the daemon holds for the user: windows, boards, processes and
            connections.
        all_fds: descriptors of all users together; others are for the daemon and its operator.
        journal_bytes: bytes of records that a restarted daemon needs.
        retain_s: how long a group may ask to be retained after its last process.
        shared: whether the daemon serves users other than its own.
    """

    sessions: int = 1024
    groups: int = 4096
    layers: int = 1 << 16
    host_bytes: int = 1 << 62
    gpu_bytes: int | None = None
    fds: int = 1 << 30
    all_fds: int = 1 << 30
    journal_bytes: int = 64 << 20
    retain_s: float = DEFAULT_RETAIN_S
    shared: bool = False

    def on_gpu(self, limit_bytes: int) -> int:
        """Returns a user's limit on a GPU on which all users together may have `limit_bytes`."""
        share = limit_bytes // 2 if self.shared else limit_bytes
        return share if self.gpu_bytes is None else self.gpu_bytes


@dataclasses.dataclass
class Usage:
    """A user's current use of each resource in UserLimits."""

    sessions: int = 0
    groups: int = 0
    layers: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    fds: int = 0
    journal_bytes: int = 0


@dataclasses.dataclass
class Connections:
    """Counts of open connections by uid, which the servers of both sockets keep up to date."""

    api: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    fd: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def fds_of(self, uid: int, sessions: int, api: int = 0, fd: int = 0) -> int:
        """Returns a user's descriptors, given its sessions and `api` and `fd` more connections."""
        idle = max(0, self.api[uid] + api - sessions), max(0, self.fd[uid] + fd - sessions)
        return SESSION_FDS * sessions + API_CONNECTION_FDS * idle[0] + idle[1]


class Quotas:
    """Refuses requests that would exceed a user's limits. Does not count resources itself."""

    def __init__(
        self,
        limits: UserLimits,
        usage: Callable[[int], Usage],
        fds: Callable[[], Mapping[int, int]],
    ) -> None:
        """`usage(uid)` returns a user's current use; `fds()` returns each user's descriptors."""
        self.limits = limits
        self.usage = usage
        self._fds = fds

    def check(self, uid: int, *, fds: int = 0, **more: int) -> None:
        """Checks that the user may have this much more, as in check(uid, groups=1).

        Raises:
            PoolExhaustedError: over the user's limit; has fields resource, asked, held and limit.
        """
        for what, asked in more.items():
            if asked:
                held = getattr(self.usage(uid), what)
                self._check(uid, what, asked, held, getattr(self.limits, what))
        if fds > 0:
            self._check_fds(uid, fds)

    def _check_fds(self, uid: int, asked: int) -> None:
        by_uid = self._fds()
        self._check(uid, "fds", asked, by_uid.get(uid, 0), self.limits.fds)
        held, limit = sum(by_uid.values()), self.limits.all_fds
        if asked > limit - held:
            raise PoolExhaustedError(
                f"the daemon is out of file descriptors: uid {uid} asks for {asked}, and all users "
                f"hold {held} of {limit}; retry when others have given some back, or raise the "
                f"limit of open files, {open_files.most_open()} (ulimit -n, LimitNOFILE= of "
                "systemd)",
                resource="fds",
                uid=uid,
                asked=asked,
                held=held,
                limit=limit,
            )

    def check_unread(self, uid: int, asked: int, unread: Mapping[int, int]) -> None:
        """Checks that `asked` more descriptors may be sent, given the `unread` ones of each uid.
        The kernel counts unread descriptors for the daemon's user, up to its limit of open files.

        Raises:
            PoolExhaustedError: over the limit of descriptors of this user or of all users.
        """
        held, all_held = unread.get(uid, 0), sum(unread.values())
        if asked > min(self.limits.fds - held, self.limits.all_fds - all_held):
            raise PoolExhaustedError(
                f"uid {uid} asks for {asked} descriptors and has not read {held} of at most "
                f"{self.limits.fds}; all users have not read {all_held} of at most "
                f"{self.limits.all_fds}: read these descriptors first",
                resource="unread",
                uid=uid,
                asked=asked,
                held=held,
                limit=self.limits.fds,
            )

    def check_retained(self, retain_s: float) -> None:
        """Raises InvalidArgumentError if `retain_s` is above the limit."""
        longest_s = self.limits.retain_s
        if retain_s > longest_s:
            raise InvalidArgumentError(
                f"retain_s must be at most {longest_s:g} (serve --max-retain-s), got {retain_s:g}",
                argument="retain_s",
            )

    def check_gpu(self, uid: int, uuid: str, asked: int, held: int, limit_bytes: int) -> None:
        """Checks that a user with `held` bytes of windows on a GPU may have `asked` bytes more.

        All users together may have `limit_bytes` there. Raises PoolExhaustedError as `check`.
        """
        self._check(uid, "gpu_bytes", asked, held, self.limits.on_gpu(limit_bytes), f" on {uuid}")

    def _check(
        self, uid: int, what: str, asked: int, held: int, limit: int, where: str = ""
    ) -> None:
        if asked > limit - held:
            told = iec if what.endswith("_bytes") else str
            raise PoolExhaustedError(
                f"uid {uid} holds {told(held)} of {what}{where} and asks for {told(asked)}, the "
                f"limit of a user is {told(limit)}, {told(asked + held - limit)} less; free some, "
                f"or start the daemon with another --max-{what.replace('_', '-')}-per-uid",
                resource=what,
                uid=uid,
                asked=asked,
                held=held,
                limit=limit,
            )
