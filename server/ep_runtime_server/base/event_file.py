"""Stores events in a file, one JSON line each, so that a restarted daemon still lists them.

Nothing depends on the file. If the daemon cannot write it, or finds a malformed line in it, events
are lost and the daemon keeps serving. A thread writes the file, because a disk may take long.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import json
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.beside import SideThread

REWRITE_AT_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 10
MAX_WAITING = 1000  # lines
WRITTEN_WITHIN_S = 1.0

# sequence, wall_s, kind, session_id, group, message, fields
Values = tuple[int, float, str, str, str, str, dict[str, Any]]
_TYPES: tuple[Any, ...] = (int, (int, float), str, str, str, str, dict)


def _line(values: Values) -> bytes:
    return json.dumps(values, separators=(",", ":"), default=str).encode() + b"\n"


class EventFile:
    """Writes events line by line; those that `written` waited for survive a kill of the daemon."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises InvalidArgumentError if `path` is not a regular file."""
        self._path = path
        self._fd = -1
        self._rewritten_bytes = 0
        try:
            self._open()
        except files.KindError as error:
            raise InvalidArgumentError(
                f"cannot keep events in {path}: {error.strerror}; remove it", argument="dir"
            ) from error
        except OSError:
            pass  # events are lost
        # Bytes since the file was last rewritten.
        self._bytes = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        self._gap = self._rewriting = False
        self._beside = SideThread("events", MAX_WAITING)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._fd = files.open_regular(self._path, flags)

    def read(self) -> Iterator[Values]:
        """Yields the file's events in order of their numbers; skips malformed lines."""
        sequence = 0
        try:
            lines = files.read_end(self._path).splitlines()
        except OSError:
            return
        for line in lines:
            values = _values(line)
            if values is not None and values[0] > sequence:
                sequence = values[0]
                yield values
        if lines:  # the last line may be incomplete
            self._write(b"\n")

    @property
    def wants_rewriting(self) -> bool:
        """Returns whether most of the file is outdated, or an event did not fit in the queue."""
        much = self._bytes > max(REWRITE_AT_BYTES, self._rewritten_bytes)
        return (much or self._gap) and not self._rewriting and not self._beside.full

    def append(self, values: Values) -> None:
        """Queues an event for the file without waiting."""
        line = _line(values)
        if len(line) <= MAX_LINE_BYTES:
            self._bytes += len(line)
            self._gap |= not self._beside.put(functools.partial(self._write, line))

    def _write(self, data: bytes) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, data)

    async def written(self) -> None:
        """Waits until all appended events are in the file, but at most WRITTEN_WITHIN_S."""
        await self._beside.settle(WRITTEN_WITHIN_S)

    def rewrite(self, rings: Sequence[Sequence[Values]]) -> None:
        """Queues the replacement of the file by one that has only the events of `rings`."""
        if self._beside.put(functools.partial(self._rewrite, rings)):
            self._gap, self._rewriting, self._bytes = False, True, 0

    def _rewrite(self, rings: Sequence[Sequence[Values]]) -> None:
        events = heapq.merge(*rings, key=operator.itemgetter(0))
        fresh = self._path.with_name(f"{self._path.name}.new")
        data = b"".join(line for event in events if len(line := _line(event)) <= MAX_LINE_BYTES)
        try:
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.rename(fresh, self._path)
        except OSError:  # keep using the old file
            return
        finally:
            self._rewritten_bytes, self._rewriting = len(data), False
        self._close()
        with contextlib.suppress(OSError):
            self._open()

    def close(self) -> None:
        """Writes the queued events, as far as the disk is fast enough."""
        if self._beside.end():
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # an error must not end the writing thread
                os.close(fd)


def _values(line: bytes) -> Values | None:
    """Parses a line; None if it is not an event."""
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
