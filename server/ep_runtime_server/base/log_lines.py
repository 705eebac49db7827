"""Formats log lines, JSON for programs and text for a terminal, and writes them on a thread.

Without the thread a full pipe would block the event loop.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from typing import Any

from ep_runtime import env
from ep_runtime.allowed_names import shown
from ep_runtime.text import printable
from ep_runtime_server.base.beside import SideThread
from ep_runtime_server.base.events import Event

_STDERR = 2
_COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_PLAIN = "\x1b[0m"


class JsonLines(logging.Formatter):
    """Formats one JSON object per line: ts, level, event, message, session, group, fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "pid": record.process,
        }
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            line["event"] = event.kind
            line.update({"session": event.session_id} if event.session_id else {})
            line.update({"group": event.group} if event.group else {})
            line.update(event.fields)
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Formats local time, level, message, and the session and group that it concerns."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None)
        parts = [record.name, record.getMessage()]
        if isinstance(event, Event):
            named = {"session": event.session_id, "group": event.group}
            about = [f"{key}={shown(name)}" for key, name in named.items() if name]
            parts = [event.kind, event.message, f"({' '.join(about)})" if about else ""]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        if self._colours and record.levelname in _COLOURS:
            level = f"{_COLOURS[record.levelname]}{level}{_PLAIN}"
        # The text has callers' names, so drop control characters and line breaks.
        text = printable(" ".join(part for part in parts if part).replace("\n", " "))
        below = f"\n{printable(self.formatException(record.exc_info))}" if record.exc_info else ""
        return f"{clock} {level} {text}{below}"


# Errors that gRPC logs with a traceback although any caller can cause them: the caller
# disconnected, its headers are not text, or the event loop ended during its call. They are
# compared by name because gRPC does not export ExecuteBatchError.
_CALLERS_OWN = ("ExecuteBatchError", "UnicodeDecodeError", "CancelledError")


def _is_failure(record: logging.LogRecord) -> bool:
    """Returns whether a record is a failure of ours, not an error that a caller causes in gRPC."""
    error = record.exc_info[0] if record.exc_info else None
    if error is None or not record.name.startswith("grpc."):
        return True
    return error.__name__ not in _CALLERS_OWN


def start_logging(level: str) -> LogWriter:
    """Logs lines of `level` and above to stderr: text on a terminal, else JSON."""
    terminal = os.isatty(_STDERR)
    writer = LogWriter(_STDERR)
    writer.setFormatter(TextLines(colours=not env.no_color()) if terminal else JsonLines())
    writer.addFilter(_is_failure)
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(level.upper())
    return writer


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
