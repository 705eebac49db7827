"""The daemon's clock, which tests can replace, and long work in short turns of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
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
