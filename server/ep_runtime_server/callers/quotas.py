"""Limits of a user's sessions, groups and memory, and current use. Knows no socket."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime.units import iec
from ep_runtime_server.base import open_files

DEFAULT_SESSIONS = 1024
DEFAULT_GROUPS = 4096
DEFAULT_LAYERS = 1 << 16
DEFAULT_JOURNAL_BYTES = 64 << 20
DEFAULT_RETAIN_S = 24 * 3600.0

# On api.sock: the accepted socket, its connection to gRPC's socket, and gRPC's end of that.
API_CONNECTION_FDS = 3
# The pidfd, and connections to both sockets.
SESSION_FDS = 1 + API_CONNECTION_FDS + 1


@dataclasses.dataclass(frozen=True)
class UserLimits:
    """Limits of every user, the daemon's own included.

    Args:
        sessions: live ones.
        groups: in any state but CLOSED.
        layers: registered layers and stacks, of all groups together.
        host_bytes: of windows and boards in host memory.
        gpu_bytes: of windows on one GPU; None for what the daemon may take there, or half of that.
        fds: descriptors that the daemon holds for the user: windows, boards, processes and
            connections.
        all_fds: of all users together; the others are the daemon's own and its operator's.
        journal_bytes: of records that a restarted daemon needs.
        retain_s: how long a group may ask to be kept after its last process.
        shared: the daemon serves other users.
    """

    sessions: int = DEFAULT_SESSIONS
    groups: int = DEFAULT_GROUPS
    layers: int = DEFAULT_LAYERS
    host_bytes: int = 1 << 62
    gpu_bytes: int | None = None
    fds: int = 1 << 30
    all_fds: int = 1 << 30
    journal_bytes: int = DEFAULT_JOURNAL_BYTES
    retain_s: float = DEFAULT_RETAIN_S
    shared: bool = False

    def on_gpu(self, limit_bytes: int) -> int:
        """Returns a user's limit on a GPU whose windows may have `limit_bytes` in all."""
        share = limit_bytes // 2 if self.shared else limit_bytes
        return share if self.gpu_bytes is None else self.gpu_bytes


@dataclasses.dataclass
class Usage:
    """A user's present use of each resource in UserLimits."""

    sessions: int = 0
    groups: int = 0
    layers: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    fds: int = 0
    journal_bytes: int = 0


@dataclasses.dataclass
class Connections:
    """Open connections by uid; the sockets count them."""

    api: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    fd: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def fds_of(self, uid: int, sessions: int, api: int = 0, fd: int = 0) -> int:
        """Descriptors of a user's sessions and further connections, with that many more of each."""
        idle = max(0, self.api[uid] + api - sessions), max(0, self.fd[uid] + fd - sessions)
        return SESSION_FDS * sessions + API_CONNECTION_FDS * idle[0] + idle[1]


class Quotas:
    """Refuses what is over a limit; whoever holds it counts it."""

    def __init__(
        self,
        limits: UserLimits,
        usage: Callable[[int], Usage],
        fds: Callable[[], Mapping[int, int]],
    ) -> None:
        """`usage(uid)` is what a user holds, `fds()` descriptors alone, of every user."""
        self.limits = limits
        self.usage = usage
        self._fds = fds

    def check(self, uid: int, *, fds: int = 0, **more: int) -> None:
        """Whether the user may hold so much more: check(uid, groups=1).

        Raises:
            PoolExhaustedError: it is over the user's limit; names what, asked, held and limit.
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
        """Whether so many descriptors may be sent on top of those by uid that nobody has read yet.
        The kernel counts them for the daemon's own user, up to its limit of open files.

        Raises:
            PoolExhaustedError: it is over the limit of the user's descriptors, or of all users'.
        """
        held, all_held = unread.get(uid, 0), sum(unread.values())
        if asked > min(self.limits.fds - held, self.limits.all_fds - all_held):
            raise PoolExhaustedError(
                f"uid {uid} asks for {asked} descriptors, and has {held} that were sent and not "
                f"read, all users {all_held}; the limits are {self.limits.fds} and "
                f"{self.limits.all_fds}: read them first",
                resource="unread",
                uid=uid,
                asked=asked,
                held=held,
                limit=self.limits.fds,
            )

    def check_retained(self, retain_s: float) -> None:
        """Raises InvalidArgumentError if retain_s is above the limit."""
        longest_s = self.limits.retain_s
        if retain_s > longest_s:
            raise InvalidArgumentError(
                f"retain_s must be at most {longest_s:g} (serve --max-retain-s), got {retain_s:g}",
                argument="retain_s",
            )

    def check_gpu(self, uid: int, uuid: str, asked: int, held: int, limit_bytes: int) -> None:
        """Whether windows of `asked` bytes may join `held` ones of the user on a GPU on which all
        users may have `limit_bytes`. Raises PoolExhaustedError as `check`."""
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
