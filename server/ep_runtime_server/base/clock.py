"""The daemon's clock, which tests can replace; waits for changes, and long work in short turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol, TypeVar


class Clock(Protocol):
    """A source of time: measure durations with `monotonic_s`, and show `wall_s` to people."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """Reads CLOCK_MONOTONIC and CLOCK_REALTIME."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class Changes:
    """Wakes tasks that wait for a change. For the event loop's thread only.

    Attributes:
        next: an event that the next change sets; get it before you read the state to wait for.
    """

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def tell(self) -> None:
        self.next.set()
        self.next = asyncio.Event()

    async def until(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Waits until `done()`, called after each change; False at the deadline."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while not done():
            try:
                # Avoid wait_for, which before Python 3.12 can lose a cancellation during a change.
                async with asyncio.timeout_at(deadline):
                    await self.next.wait()
            except TimeoutError:
                return done()
        return True


# Longest turn on the event loop, not counting the turn's last item.
TURN_S = 0.01
T = TypeVar("T")


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields `items`, and runs other tasks every TURN_S. `items` must not change until the end."""
    until_s = time.monotonic() + TURN_S
    for item in items:
        yield item
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = time.monotonic() + TURN_S
