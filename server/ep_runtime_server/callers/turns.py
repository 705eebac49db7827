"""Serves requests of many connections in small turns, one user after the other."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ep_runtime_server.base.clock import TURN_S

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """Queues work first in, first out for each user, and serves users in turn."""

    def __init__(self) -> None:
        self._of_user: dict[int, collections.deque[_Item]] = {}  # by uid, in serving order

    def __bool__(self) -> bool:
        return bool(self._of_user)

    def put(self, uid: int, item: _Item) -> None:
        self._of_user.setdefault(uid, collections.deque()).append(item)

    def take(self) -> _Item:
        uid = next(iter(self._of_user))
        own = self._of_user.pop(uid)
        item = own.popleft()
        if own:
            self._of_user[uid] = own  # behind the other users
        return item


class Turns:
    """Runs callbacks in turns of about TURN_S, and other events of the loop in between.

    Without turns, an event loop runs all ready callbacks before it polls again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._due = False
        self._until_s: float | None = None  # end of this round; None between rounds

    def now(self, uid: int, work: Callable[[], None]) -> bool:
        """Calls `work()` and returns True if no work waits and this round has time left.

        Else queues `work()` as `add` does, and returns False.
        """
        if self._until_s is None:
            self._until_s = time.monotonic() + TURN_S
            self._loop.call_soon(self._next_round)
        if self._waiting or time.monotonic() >= self._until_s:
            self.add(uid, work)
            return False
        work()
        return True

    def _next_round(self) -> None:
        self._until_s = None

    def add(self, uid: int, work: Callable[[], None]) -> None:
        """Queues `work()` after the user's earlier requests."""
        self._waiting.put(uid, work)
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
                self._waiting.take()()
                if time.monotonic() >= until_s:
                    return
        finally:
            self._call()
