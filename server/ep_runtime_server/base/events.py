"""Records state changes as events: in bounded rings for `ListEvents`, and in the daemon's log.

Each kind of object (session, group and so on) has its own ring, so that frequent events of one kind
do not push out events of another. Denials are also rate-limited, because any caller can cause
them. A file keeps the events and their numbers for a restarted daemon. Nothing depends on it: if
the daemon cannot write it, or finds a malformed line in it, events are lost and the daemon keeps
serving. A thread writes the file, because a disk may take long.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import json
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.beside import SideThread
from ep_runtime_server.base.clock import Clock

MAX_EVENTS_PER_RING = 2000
MAX_RINGS = 32
# Denials of one cause, and of all causes: this many at once, then one per interval.
DENIALS_AT_ONCE, DENIAL_EVERY_S = 5, 10.0
ALL_DENIALS_AT_ONCE, ANY_DENIAL_EVERY_S = 50, 1.0
MAX_CAUSES = 1024
TELL_SUPPRESSED_EVERY_S = 10.0
_DENIED = "denied"
logger = logging.getLogger("ep_runtime_server")


class Event(NamedTuple):
    sequence: int
    wall_s: float
    kind: str
    session_id: str
    group: str
    message: str
    fields: dict[str, Any]


class _Allowance:
    """A rate limit: allows `at_once` events, then one per `every_s`."""

    def __init__(self, at_once: int, every_s: float, now_s: float) -> None:
        self._at_once = at_once
        self._every_s = every_s
        self._left = float(at_once)
        self._seen_s = now_s

    def take(self, now_s: float) -> bool:
        more = (now_s - self._seen_s) / self._every_s
        self._left, self._seen_s = min(self._at_once, self._left + more), now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


REWRITE_AT_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 10
MAX_WAITING = 1000  # lines
WRITTEN_WITHIN_S = 1.0
# Types of an event's fields.
_TYPES: tuple[Any, ...] = (int, (int, float), str, str, str, str, dict)


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"


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
                f"cannot keep events in {path}: {error.strerror}; remove that file", argument="dir"
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

    def read(self) -> Iterator[Event]:
        """Yields the file's events in order of their numbers; skips malformed lines."""
        sequence = 0
        try:
            lines = files.read_end(self._path).splitlines()
        except OSError:
            return
        for line in lines:
            event = _event(line)
            if event is not None and event.sequence > sequence:
                sequence = event.sequence
                yield event
        if lines:  # the last line may be incomplete
            self._write(b"\n")

    @property
    def wants_rewriting(self) -> bool:
        """Returns whether most of the file is outdated, or an event did not fit in the queue."""
        much = self._bytes > max(REWRITE_AT_BYTES, self._rewritten_bytes)
        return (much or self._gap) and not self._rewriting and not self._beside.full

    def append(self, event: Event) -> None:
        """Queues an event for the file without waiting."""
        line = _line(event)
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

    def rewrite(self, rings: Sequence[Sequence[Event]]) -> None:
        """Queues the replacement of the file by one that has only the events of `rings`."""
        if self._beside.put(functools.partial(self._rewrite, rings)):
            self._gap, self._rewriting, self._bytes = False, True, 0

    def _rewrite(self, rings: Sequence[Sequence[Event]]) -> None:
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


def _event(line: bytes) -> Event | None:
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
    return Event(*values)


class EventLog:
    """Collects the daemon's events. Callers must not pass a session token or attach token."""

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        """Reads earlier events from the file at `path`, and appends new ones; None for no file."""
        self._clock = clock
        self._rings: dict[str, collections.deque[Event]] = {}
        self._sequence = 0
        now_s = clock.monotonic_s()
        self._denials = _Allowance(ALL_DENIALS_AT_ONCE, ANY_DENIAL_EVERY_S, now_s)
        self._by_cause: dict[tuple[str, object], _Allowance] = {}
        self._suppressed: collections.Counter[str] = collections.Counter()
        self._told_s = now_s
        self.lost_lines: Callable[[], int] = lambda: 0  # log lines lost since the last report
        self._file = EventFile(path) if path is not None else None
        if self._file is not None:
            self._restore(self._file)

    def _restore(self, file: EventFile) -> None:
        for event in file.read():
            self._ring(event.kind).append(event)
            self._sequence = event.sequence
        if self._sequence:
            self.add("server.events_kept", f"events up to {self._sequence} are of a daemon before")

    def _ring(self, kind: str) -> collections.deque[Event]:
        name = _DENIED if kind.endswith(_DENIED) else kind.partition(".")[0]
        if name not in self._rings and len(self._rings) >= MAX_RINGS:
            name = next(iter(self._rings))
        return self._rings.setdefault(name, collections.deque(maxlen=MAX_EVENTS_PER_RING))

    def add(
        self,
        kind: str,
        message: str,
        *,
        session_id: str = "",
        group: str = "",
        level: int = logging.INFO,
        **fields: Any,
    ) -> None:
        self._sequence += 1
        event = Event(
            self._sequence, self._clock.wall_s(), kind, session_id, group, message, fields
        )
        self._ring(kind).append(event)
        if self._file is not None:
            self._file.append(event)
            self._tidy(self._file)
        logger.log(level, message, extra={"event": event})

    def _tidy(self, file: EventFile) -> None:
        if file.wants_rewriting:
            file.rewrite([list(ring) for ring in self._rings.values()])

    def deny(self, kind: str, cause: object, message: str, **fields: Any) -> None:
        """Adds a denial (kind "*.denied"), unless this cause or all causes had too many.

        Args:
            cause: a key to count denials by, such as the refused uid; the event lacks it.
        """
        now_s = self._clock.monotonic_s()
        allowance = self._by_cause.pop((kind, cause), None)
        if allowance is None:
            allowance = _Allowance(DENIALS_AT_ONCE, DENIAL_EVERY_S, now_s)
            if len(self._by_cause) >= MAX_CAUSES:
                del self._by_cause[next(iter(self._by_cause))]
        self._by_cause[kind, cause] = allowance  # the least recently used one is first
        if allowance.take(now_s) and self._denials.take(now_s):
            self.add(kind, message, level=logging.WARNING, **fields)
        else:
            self._suppressed[kind] += 1

    def tick(self) -> None:
        """Reports the number of suppressed denials and lost log lines, at most every 10 s."""
        if self._file is not None:
            self._tidy(self._file)
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s < TELL_SUPPRESSED_EVERY_S:
            return
        self._told_s = now_s
        if lost := self.lost_lines():
            message = f"{lost} lines of the log were lost: nobody read it"
            self.add("log.lost", message, level=logging.WARNING, lost=lost)
        suppressed, self._suppressed = self._suppressed, collections.Counter()
        for kind, count in suppressed.items():
            self.add(kind, f"{count} more of these", level=logging.WARNING, suppressed=count)

    def after(self, sequence: int) -> list[Event]:
        """Returns the events after number `sequence`, oldest first."""
        rings = [
            [event for event in ring if event.sequence > sequence] for ring in self._rings.values()
        ]
        return list(heapq.merge(*rings, key=operator.attrgetter("sequence")))

    async def written(self) -> None:
        """Waits briefly until all events are in the file, which a restarted daemon reads."""
        if self._file is not None:
            await self._file.written()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
