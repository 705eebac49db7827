"""Named points at which tests make the daemon fail. Off unless `--testing failpoint:...` is given.

failpoint:NAME=kill[:N]      SIGKILL the daemon when the point is reached the N-th time (default 1)
failpoint:NAME=enospc[:N]    raise ENOSPC at the point, N times; without N always
failpoint:NAME=eio[:N]       raise EIO at the point, N times; without N always
failpoint:NAME=lost:P        lose the message in P of 100 cases; a restart repeats the same cases
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
from collections.abc import Iterable

from ep_runtime.errors import InvalidArgumentError

PREFIX = "failpoint:"
NAMES = (
    "cluster.after_write",
    "cluster.before_rename",
    "cluster.before_write",
    "cluster.reserve",
    "cluster.torn_write",
    "fd.before_send",
    "fd.after_send",
    "fd.answer",
    "fd.request",
    "journal.after_write",
    "journal.before_rename",
    "journal.before_write",
    "journal.reserve",
    "journal.torn_write",
    "recovery.adopted",
    "recovery.restored",
    "rpc.answer",
    "rpc.before_answer",
    "rpc.request",
)
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


class LostError(ConnectionResetError):
    """Raised to lose a request or an answer: the caller sees only that its call ended."""


@dataclasses.dataclass
class _Point:
    action: str
    count: int
    chance: random.Random


def parse(text: str) -> tuple[str, str, int]:
    """Parses `failpoint:NAME=ACTION[:N]` into (name, action, count); count is 0 without N.

    Raises:
        InvalidArgumentError: the point or action does not exist.
    """
    name, _, rest = text.removeprefix(PREFIX).partition("=")
    action, _, count = rest.partition(":")
    known = name in NAMES and action in ("kill", "lost", *_ERRORS)
    if not text.startswith(PREFIX) or not known or (count and not count.isdecimal()):
        raise InvalidArgumentError(
            f"a failpoint is {PREFIX}NAME=kill|enospc|eio|lost[:N], NAME one of {NAMES}, "
            f"got {text!r}",
            argument="testing",
        )
    return name, action, int(count or 0)


class Failpoints:
    """The armed failpoints of one daemon."""

    def __init__(self, switches: Iterable[str] = ()) -> None:
        """Arms the `switches` that begin with `failpoint:`, and ignores the rest."""
        self._armed: dict[str, _Point] = {}
        for text in switches:
            if text.startswith(PREFIX):
                name, action, count = parse(text)
                count = count or (1 if action == "kill" else -1)
                self._armed[name] = _Point(action, count, random.Random(name))

    def due(self, name: str) -> bool:
        """Counts a pass of the point; returns whether a kill is due. Raises an armed OSError."""
        point = self._armed.get(name)
        if point is None or point.count == 0:
            return False
        if point.action == "lost":
            if point.chance.random() * 100 < point.count:
                raise LostError(name)
            return False
        point.count -= 1
        if point.action == "kill":
            return point.count == 0
        raise OSError(_ERRORS[point.action], os.strerror(_ERRORS[point.action]))

    def hit(self, name: str) -> None:
        """Runs the point's armed failure; does nothing in a daemon without --testing.

        Raises:
            OSError: the point is armed with an error.
        """
        if self.due(name):
            os.kill(os.getpid(), signal.SIGKILL)
