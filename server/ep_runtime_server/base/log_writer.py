"""Writes the log on a thread, because a full pipe would block the event loop."""

from __future__ import annotations

import functools
import logging
import os

from ep_runtime_server.base.beside import SideThread

MAX_LINES = 10_000


class LogWriter(logging.Handler):
    """Queues log lines for a writing thread; if the queue is full, drops and counts lines."""

    def __init__(self, fd: int, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._fd = fd
        self._refused = self._unwritten = self._told = 0
        self.beside = SideThread("log", max_lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line without waiting, or counts it as lost."""
        line = f"{self.format(record)}\n".encode(errors="replace")
        if not self.beside.put(functools.partial(self._write, line)):
            self._refused += 1

    def take_lost(self) -> int:
        """Returns how many lines were lost since the last call; 0 while the queue is full."""
        if self.beside.full:
            return 0
        lost = self._refused + self._unwritten
        fresh, self._told = lost - self._told, lost
        return fresh

    def _write(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError:  # the log's reader is gone
            self._unwritten += 1

    def end(self) -> None:
        """Writes the queued lines, as far as the log's reader is fast enough."""
        self.beside.end()
