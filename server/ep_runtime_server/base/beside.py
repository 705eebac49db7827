"""Runs work on a thread next to the event loop, because a pipe or a disk may take long."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

END_S = 1.0

Work = Callable[[], None]


class SideThread:
    """Runs queued functions one after the other on a thread. The functions must not raise."""

    def __init__(self, name: str, most_waiting: int) -> None:
        self._work: queue.Queue[Work | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def empty(self) -> bool:
        """Returns whether the queue is empty; the last function may still be running."""
        return self._work.empty()

    @property
    def full(self) -> bool:
        return self._work.full()

    def put(self, work: Work) -> bool:
        """Queues a function without waiting; returns False if the queue is full."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            return False
        return True

    async def settle(self, within_s: float) -> None:
        """Waits until all work queued so far is done, but at most `within_s`."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # raised if the loop is closed
                loop.call_soon_threadsafe(done.set)

        if self.put(tell):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await done.wait()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def end(self) -> bool:
        """Finishes queued work as far as END_S allows; returns whether all of it was done."""
        try:
            self._work.put(None, timeout=END_S)
        except queue.Full:
            return False
        self._thread.join(END_S)
        return not self._thread.is_alive()
