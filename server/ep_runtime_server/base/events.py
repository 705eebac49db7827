"""Records state changes as events: in bounded rings for `ListEvents`, and in the daemon's log.

Each kind of object (session, group and so on) has its own ring, so that frequent events of one kind
do not push out events of another. Denials are also rate-limited, because any caller can cause
them. A file keeps the events and their numbers for a restarted daemon.
"""

from __future__ import annotations

import collections
import heapq
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.event_file import EventFile

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
        for values in file.read():
            event = Event(*values)
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
        """Waits briefly until the file has all events so far, for a restarted daemon."""
        if self._file is not None:
            await self._file.written()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
