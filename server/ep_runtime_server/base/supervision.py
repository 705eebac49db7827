"""Supervises background work: reports failures, shows them in health, and tries again.

Without supervision, a daemon whose periodic work failed would look alive and free nothing.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ep_runtime_server.base.events import EventLog

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
# Failed work counts as recovered once it has run for this long.
WORKS_AFTER_S = 1.0


def tell_failure(events: EventLog, name: str, error: BaseException) -> None:
    """Reports a fault of the daemon: adds an event, and writes a traceback to the log."""
    logging.getLogger(__name__).error("%s failed", name, exc_info=error)
    events.add(
        "task.failed",
        f"{name}: {type(error).__name__}: {error}"[:500],
        level=logging.ERROR,
        task=name,
    )


class Tasks:
    """Runs work in tasks, reports its faults, and cancels the rest at the end.

    Attributes:
        running: the tasks that have not ended.
    """

    def __init__(self, events: EventLog, name: str) -> None:
        self._events = events
        self._name = name
        self.running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            tell_failure(self._events, self._name, error)

    async def stop(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


class Supervisor:
    """Runs background work: `keep` restarts endless work, `run` does one round of repeated work.

    Attributes:
        failing: names of the work whose last try failed.
    """

    def __init__(self, events: EventLog, on_change: Callable[[], None]) -> None:
        """Calls `on_change()` when `failing` has changed."""
        self._events = events
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: dict[str, str] = {}  # last reported failure, by name

    @property
    def failing(self) -> list[str]:
        return sorted(self._failures)

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work()` in a task until it returns; starts it again after a failure."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._keep(name, work)))

    async def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = RETRY_FIRST_S
        while True:
            started_s = loop.time()
            well = loop.call_later(WORKS_AFTER_S, self._works, name)
            try:
                await work()
                self._works(name)
                return
            except Exception as error:  # noqa: BLE001 - no error may end the daemon
                if loop.time() - started_s >= WORKS_AFTER_S:
                    pause_s = RETRY_FIRST_S
                self._failed(name, error)
            finally:
                well.cancel()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MOST_S)

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Calls `work()`; reports a failure once, however often it recurs."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - no error may stop the round
            self._failed(name, error)
        else:
            self._works(name)

    def _failed(self, name: str, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        known = self._failures.get(name)
        self._failures[name] = what
        if known != what:
            tell_failure(self._events, name, error)
        if known is None:
            self._on_change()

    def _works(self, name: str) -> None:
        if self._failures.pop(name, None) is not None:
            self._events.add("task.works", f"{name} works again", task=name)
            self._on_change()

    def in_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Reports an error of a callback or a forgotten task; an event loop's exception handler."""
        error = context.get("exception")
        if isinstance(error, Exception):
            tell_failure(self._events, str(context.get("message", "a callback")), error)
        else:
            loop.default_exception_handler(context)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


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
