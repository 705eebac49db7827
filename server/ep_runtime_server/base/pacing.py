"""Does long work in short turns, so that no request blocks the event loop for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

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
