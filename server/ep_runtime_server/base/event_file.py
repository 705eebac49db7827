"""Events in a file, one JSON line each: what a daemon that starts again still tells.

Nothing depends on it. Where it cannot be written, or a line of it is none of ours, events are lost
and the daemon goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REWRITE_AT_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 10

# sequence, wall_s, kind, session_id, group, message, fields
Values = tuple[int, float, str, str, str, str, dict[str, Any]]
_TYPES: tuple[Any, ...] = (int, (int, float), str, str, str, str, dict)


def _line(values: tuple[Any, ...]) -> bytes:
    return json.dumps(values, separators=(",", ":"), default=str).encode() + b"\n"


class EventFile:
    """Written line by line: what a killed daemon said is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._bytes = self._rewritten_bytes = 0
        self._open(path, os.O_APPEND)

    def _open(self, path: Path, how: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            self._fd = os.open(path, flags | how, 0o600)
            self._bytes = os.fstat(self._fd).st_size

    def read(self) -> Iterator[Values]:
        """What is there, by number; lines that are no events are left out."""
        sequence = 0
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            values = _values(line)
            if values is not None and values[0] > sequence:
                sequence = values[0]
                yield values
        if lines:  # the last one may be torn
            self._write(b"\n")

    @property
    def wants_rewriting(self) -> bool:
        """Whether most of it is of events that nobody keeps any more."""
        return self._bytes > max(REWRITE_AT_BYTES, 2 * self._rewritten_bytes)

    def append(self, values: tuple[Any, ...]) -> None:
        self._write(_line(values))

    def _write(self, data: bytes) -> None:
        if self._fd >= 0 and len(data) <= MAX_LINE_BYTES:
            with contextlib.suppress(OSError):
                self._bytes += os.write(self._fd, data)

    def rewrite(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Puts a file of these events alone in the place of the old one."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        data = b"".join(line for event in events if len(line := _line(event)) <= MAX_LINE_BYTES)
        self._rewritten_bytes = len(data)
        try:
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.rename(fresh, self._path)
        except OSError:
            self._rewritten_bytes = self._bytes  # not again with every event
            return
        self.close()
        self._open(self._path, os.O_APPEND)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _values(line: bytes) -> Values | None:
    """The values of a line; None where it is no event."""
    if not line or len(line) > MAX_LINE_BYTES:
        return None
    try:
        values = json.loads(line)
        right = all(isinstance(x, kind) for x, kind in zip(values, _TYPES, strict=True))
        if not right or not 0 < values[0] < 1 << 62 or not 0 <= values[1] < 1 << 40:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    return values[0], values[1], values[2], values[3], values[4], values[5], values[6]
