"""Long work in short turns: nobody's request holds the event loop from everybody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

# Longest turn of the loop, not counting the last item.
TURN_S = 0.01

T = TypeVar("T")


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """`items`, which must not change meanwhile; gives the loop back whenever a turn is over."""
    until_s = time.monotonic() + TURN_S
    for item in items:
        yield item
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = time.monotonic() + TURN_S
