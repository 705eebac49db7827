"""How much of the daemon one user may take with calls under way: their number, and their bytes.

Nobody's calls keep out those of another user: each has limits of their own, and the daemon's limit
is larger than any of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator

from ep_runtime.errors import PoolExhaustedError

MAX_CALLS = 16_384
# A session has a stream open, and a few calls that wait for others.
MAX_CALLS_PER_USER = 4096
# Watches of the health service by callers that nobody knows.
MAX_WATCHES = 64
# Of requests that are read or worked on. A message may be 50 times as large once it is parsed.
MAX_BYTES_PER_USER = 4 << 20


class Room:
    """Bytes that calls of one user share; who finds none waits for its turn."""

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


class _User:
    def __init__(self) -> None:
        self.calls = 0
        self.room = Room(MAX_BYTES_PER_USER)


class Admission:
    """The calls that are under way, by user."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._calls = 0
        self._watches = 0

    @contextlib.contextmanager
    def call(self, user: str) -> Iterator[Room]:
        """Counts a call while it lasts.

        Raises:
            PoolExhaustedError: the user has too many under way, or all users together.
        """
        found = self._users.setdefault(user, _User())
        if found.calls >= MAX_CALLS_PER_USER or self._calls >= MAX_CALLS:
            raise PoolExhaustedError(
                f"{user} has {found.calls} calls under way, the limit is {MAX_CALLS_PER_USER}, and "
                f"{MAX_CALLS} for all users; retry",
                limit=MAX_CALLS_PER_USER,
            )
        found.calls += 1
        self._calls += 1
        try:
            yield found.room
        finally:
            found.calls -= 1
            self._calls -= 1
            if not found.calls:
                del self._users[user]

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Counts a stream of a caller that nobody knows. Raises PoolExhaustedError."""
        if self._watches >= MAX_WATCHES:
            raise PoolExhaustedError(
                f"{MAX_WATCHES} streams watch the daemon's health, which is the limit; use Check",
                limit=MAX_WATCHES,
            )
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1
