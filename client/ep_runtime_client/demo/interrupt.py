"""Ctrl-C as a request: the step in flight ends, what was trained is reported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# A terminal that takes no more text must not hold the end of the program up.
TELL_TIMEOUT_S = 2.0

AGAIN_S = 0.01


class StopRequest:
    """Context manager: the first SIGINT sets `requested`, a second one interrupts at once.

    Outside the main thread, where Python delivers no signals, it changes nothing. An interrupt that
    comes in the middle of a callback of the garbage collector (JAX has one), where Python drops
    exceptions, comes again after it.

    Args:
        on_request: called once, after the first SIGINT, to tell the user. It runs on a thread of
            its own: the signal may have come in the middle of a write to the same stream, and a
            stream cannot be entered twice by one thread.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._on_request = on_request
        self._wake = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="ep-stop-request", daemon=True)
        self._previous: signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        self._previous = None
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._teller.start()
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            sys.unraisablehook = self._unraisable
            self._wake.set()
            self._teller.join(TELL_TIMEOUT_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._wake.set()

    def _on_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            again = (os.getpid(), signal.SIGINT)
            threading.Timer(AGAIN_S, os.kill, again).start()  # here, Python would drop it once more
        else:
            self._unraisable(dropped)

    def _tell(self) -> None:
        self._wake.wait()
        if self.requested:
            self._on_request()
