"""Limits the running calls of one user: their number and their bytes.

A call is under way until its caller has the answer, or is gone: who does not read holds memory.
Nobody's calls keep out those of another user: each has limits of their own, and the daemon's limit
is larger than any of them.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from types import TracebackType

from ep_runtime.errors import PoolExhaustedError

MAX_CALLS = 16_384
# A session has a stream open, and a few calls that wait for others.
MAX_CALLS_PER_USER = 4096
# Calls of each health method by one user.
MAX_HEALTH_CALLS_PER_USER = 64
# Bytes of requests in work. A parsed message may be 50 times as large.
MAX_BYTES_PER_USER = 4 << 20
# Bytes of unread answers; the largest one is 16 MiB.
MAX_ANSWER_BYTES_PER_USER = 64 << 20


class Room:
    """Bytes that calls of one user share; a call without room waits for its turn."""

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
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.health_calls: collections.Counter[str] = collections.Counter()
        self.answer_bytes = 0
        self.room = Room(MAX_BYTES_PER_USER)

    @property
    def idle(self) -> bool:
        return not self.calls and not self.health_calls.total()


class AdmittedCall:
    """One call from its begin to its `end`, which may come twice."""

    def __init__(self, user: _User, end: Callable[[], None]) -> None:
        self._user = user
        self._end: Callable[[], None] | None = end
        self._answer_bytes = 0

    @property
    def room(self) -> Room:
        """Room for the request, which all calls of the user share."""
        return self._user.room

    def answer(self, size_bytes: int) -> None:
        """Counts bytes of an answer until the caller has read them. Raises PoolExhaustedError."""
        user = self._user
        if size_bytes > MAX_ANSWER_BYTES_PER_USER - user.answer_bytes:
            raise PoolExhaustedError(
                f"{user.name} has {user.answer_bytes} bytes of answers to read, and asks for "
                f"{size_bytes} more, the limit is {MAX_ANSWER_BYTES_PER_USER}; read them",
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

    def __enter__(self) -> AdmittedCall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class Admission:
    """The calls that are under way, by user."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._calls = 0

    def call(self, user: str) -> AdmittedCall:
        """Counts a call until it ends.

        Raises:
            PoolExhaustedError: the user has too many under way, or all users together.
        """
        found = self._users.setdefault(user, _User(user))
        if found.calls >= MAX_CALLS_PER_USER or self._calls >= MAX_CALLS:
            raise PoolExhaustedError(
                f"{user} has {found.calls} calls under way, the limit is {MAX_CALLS_PER_USER}, and "
                f"{MAX_CALLS} for all users; retry",
                limit=MAX_CALLS_PER_USER,
            )
        found.calls += 1
        self._calls += 1

        def end() -> None:
            found.calls -= 1
            self._calls -= 1
            self._forget(found)

        return AdmittedCall(found, end)

    def health_call(self, user: str, method: str) -> AdmittedCall:
        """Admits a call of the health service, which needs no room among other calls."""
        found = self._users.setdefault(user, _User(user))
        if found.health_calls[method] >= MAX_HEALTH_CALLS_PER_USER:
            raise PoolExhaustedError(
                f"{user} has {MAX_HEALTH_CALLS_PER_USER} calls of {method} under way, which is the "
                "limit; read their answers",
                limit=MAX_HEALTH_CALLS_PER_USER,
            )
        found.health_calls[method] += 1

        def end() -> None:
            found.health_calls[method] -= 1
            self._forget(found)

        return AdmittedCall(found, end)

    def _forget(self, user: _User) -> None:
        if user.idle:
            self._users.pop(user.name, None)
