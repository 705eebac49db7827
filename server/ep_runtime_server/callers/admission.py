"""Limits the number and the bytes of each user's running calls.

A call runs until its caller has read the answer or disconnected, because an unread answer takes
memory. One user's calls cannot shut out another user's: each user has its own limits, and the
daemon's limit is larger than any of them.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from ep_runtime.errors import PoolExhaustedError

MAX_CALLS = 16_384
# Enough for many sessions, each with one open stream and a few waiting calls.
MAX_CALLS_PER_USER = 4096
# Limit of one user's calls of each health method.
MAX_HEALTH_CALLS_PER_USER = 64
# Bytes of requests being handled; a parsed message may be 50 times as large.
MAX_BYTES_PER_USER = 4 << 20
# Bytes of unread answers; the largest one is 16 MiB.
MAX_ANSWER_BYTES_PER_USER = 64 << 20


class Room:
    """A budget of bytes that one user's calls share; a call waits until its bytes fit."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes
        self._waiters: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def take(self, size_bytes: int) -> None:
        if self._free >= size_bytes and not self._waiters:
            self._free -= size_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size_bytes)
            raise

    def give(self, size_bytes: int) -> None:
        self._free += size_bytes
        while self._waiters:
            wanted, turn = self._waiters[0]
            if not turn.cancelled():
                if wanted > self._free:
                    return
                self._free -= wanted
                turn.set_result(None)
            self._waiters.popleft()


# Calls are counted by health method, and all other calls under this key.
_NOT_HEALTH = ""


class _User:
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: collections.Counter[str] = collections.Counter()
        self.answer_bytes = 0
        self.room = Room(MAX_BYTES_PER_USER)


class AdmittedCall:
    """One running call; calling `end` again does nothing."""

    def __init__(self, user: _User, end: Callable[[], None]) -> None:
        self._user = user
        self._end: Callable[[], None] | None = end
        self._answer_bytes = 0

    @property
    def room(self) -> Room:
        """The budget of request bytes, which all calls of the user share."""
        return self._user.room

    def answer(self, size_bytes: int) -> None:
        """Counts bytes of an answer until the call ends. Raises PoolExhaustedError."""
        user = self._user
        if size_bytes > MAX_ANSWER_BYTES_PER_USER - user.answer_bytes:
            raise PoolExhaustedError(
                f"unread answers must be at most {MAX_ANSWER_BYTES_PER_USER} bytes per user, "
                f"got {user.answer_bytes} of {user.name} and {size_bytes} more; read them",
                asked=size_bytes,
                held=user.answer_bytes,
                limit=MAX_ANSWER_BYTES_PER_USER,
            )
        self._answer_bytes += size_bytes
        user.answer_bytes += size_bytes

    def end(self) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            self._user.answer_bytes -= self._answer_bytes
            end()


class Admission:
    """Counts and limits running calls by user."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._calls: collections.Counter[str] = collections.Counter()

    def call(self, user: str) -> AdmittedCall:
        """Admits a call, and counts it until its `end`.

        Raises:
            PoolExhaustedError: the user or all users together have too many running calls.
        """
        found = self._users.setdefault(user, _User(user))
        held, all_held = found.calls[_NOT_HEALTH], self._calls[_NOT_HEALTH]
        if held >= MAX_CALLS_PER_USER or all_held >= MAX_CALLS:
            raise PoolExhaustedError(
                f"calls under way must be at most {MAX_CALLS_PER_USER} per user and "
                f"{MAX_CALLS} in all, got {held} of {user} and {all_held} in all; retry",
                limit=MAX_CALLS_PER_USER,
            )
        return self._admitted(found, _NOT_HEALTH)

    def health_call(self, user: str, method: str) -> AdmittedCall:
        """Admits a call of the health service, which does not count among the other calls."""
        found = self._users.setdefault(user, _User(user))
        if found.calls[method] >= MAX_HEALTH_CALLS_PER_USER:
            raise PoolExhaustedError(
                f"{user} has {MAX_HEALTH_CALLS_PER_USER} calls of {method} under way, which is the "
                "limit; read their answers",
                limit=MAX_HEALTH_CALLS_PER_USER,
            )
        return self._admitted(found, method)

    def _admitted(self, user: _User, kind: str) -> AdmittedCall:
        counts = (user.calls, self._calls)
        for count in counts:
            count[kind] += 1

        def end() -> None:
            for count in counts:
                count[kind] -= 1
            if not user.calls.total():
                self._users.pop(user.name, None)

        return AdmittedCall(user, end)
