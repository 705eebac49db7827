"""The log, written beside the event loop: its reader may stop, and then a full pipe waits."""

from __future__ import annotations

import logging
import os
import queue
import threading

MAX_LINES = 10_000
END_S = 1.0


class LogWriter(logging.Handler):
    """Hands lines to a thread; those for which there is no room are counted, and gone."""

    def __init__(self, fd: int, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_lines)
        self._refused = self._unwritten = self._told = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self._lines.put_nowait(f"{self.format(record)}\n".encode(errors="replace"))
        except queue.Full:
            self._refused += 1

    def take_lost(self) -> int:
        """Lines that were lost since it was asked last; 0 while the next one would be lost too."""
        if self._lines.full():
            return 0
        lost = self._refused + self._unwritten
        fresh, self._told = lost - self._told, lost
        return fresh

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # nobody is there to read
                self._unwritten += 1

    def end(self) -> None:
        """Writes what is left, as far as somebody takes it in time."""
        try:
            self._lines.put(None, timeout=END_S)
        except queue.Full:
            return
        self._thread.join(END_S)
