"""An event loop whose time passes only when nothing is left to do."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any

# Time of a disk write, usual and worst.
_DISK_S, _SLOW_DISK_S = 0.002, 0.3
# Turns of the loop between two moments; a normal schedule has some hundred at most.
_MOST_TURNS = 10_000


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: it advances the clock by the time it was asked to wait."""

    now_s = 1000.0
    _turns = 0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        self._turns = 0 if timeout is None or timeout > 0 else self._turns + 1
        if self._turns > _MOST_TURNS:
            self._turns = 0
            raise RuntimeError(f"{_MOST_TURNS} turns of the loop, and no time has passed")
        if not found and timeout is None:
            raise RuntimeError("nobody has anything left to do")
        if not found and timeout is not None and timeout > 0:
            self.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without threads. Work for a thread runs in the loop, after a random delay."""

    def __init__(self, seed: int) -> None:
        self._pace = _Selector()
        self._random = random.Random(seed)
        super().__init__(self._pace)

    def time(self) -> float:
        return self._pace.now_s

    def monotonic_s(self) -> float:
        return self._pace.now_s

    def wall_s(self) -> float:
        return 1.7e9 + self._pace.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        slow = self._random.random() < 0.05
        self.call_later(self._random.uniform(0.0, _SLOW_DISK_S if slow else _DISK_S), work)
        return future
