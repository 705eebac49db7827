"""Ctrl-C as a request: the step in flight ends, what was trained is reported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# A shell's convention for a program that SIGINT ended.
INTERRUPTED = 130


class StopRequest:
    """Context manager: the first SIGINT sets `requested`, a second one interrupts at once.

    Outside the main thread, where Python delivers no signals, it changes nothing.

    Args:
        on_request: called once, at the first SIGINT, to tell the user.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._on_request = on_request
        self._previous: signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        self._previous = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
