"""Measures delays of the event loop, which delay all clients."""

from __future__ import annotations

import asyncio
import collections

SAMPLE_EVERY_S = 0.02
WINDOW_S = 60.0


class LoopLag:
    """The measured delays of the event loop.

    Attributes:
        worst_s: the largest delay since the daemon started.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[float] = collections.deque(
            maxlen=round(WINDOW_S / SAMPLE_EVERY_S)
        )
        self.worst_s = 0.0

    async def measure(self) -> None:
        """Samples the delay until cancelled; may miss delays shorter than SAMPLE_EVERY_S."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + SAMPLE_EVERY_S
            await asyncio.sleep(SAMPLE_EVERY_S)
            self.add(max(0.0, loop.time() - due_s))

    def add(self, lag_s: float) -> None:
        self._samples.append(lag_s)
        self.worst_s = max(self.worst_s, lag_s)

    @property
    def recent_worst_s(self) -> float:
        """Returns the largest delay of the last minute."""
        return max(self._samples, default=0.0)

    @property
    def p99_s(self) -> float:
        """Returns the 99th percentile of the delays of the last minute."""
        ordered = sorted(self._samples)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
