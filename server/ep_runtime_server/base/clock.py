"""The daemon's clock, which tests can replace."""

from __future__ import annotations

import time
from typing import Protocol


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
