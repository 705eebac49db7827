"""What many connections want at once, a little at a time and one user after the other."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable

from ep_runtime_server.pacing import TURN_S


class Turns:
    """Runs callbacks for at most TURN_S, next to what the last one costs, and lets others go on.

    An event loop alone runs all that is ready before it looks again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[int, collections.deque[Callable[[], None]]] = {}  # by uid, in turn
        self._due = False

    def add(self, uid: int, work: Callable[[], None]) -> None:
        """`work()` soon, after what the user asked for before."""
        self._waiting.setdefault(uid, collections.deque()).append(work)
        self._call()

    def _call(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        until_s = time.monotonic() + TURN_S
        try:
            while self._waiting:
                self._next()()
                if time.monotonic() >= until_s:
                    return
        finally:
            self._call()

    def _next(self) -> Callable[[], None]:
        uid = next(iter(self._waiting))
        own = self._waiting.pop(uid)
        work = own.popleft()
        if own:
            self._waiting[uid] = own  # behind the others
        return work
