"""Time as the daemon sees it, so that tests can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Durations come from `monotonic_s` only; `wall_s` is for people."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """CLOCK_MONOTONIC and CLOCK_REALTIME."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
