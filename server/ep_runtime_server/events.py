"""State changes: a bounded log for `ListEvents`, and one JSON line each on stderr."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import sys
from typing import Any

from ep_runtime_server.clock import Clock

MAX_EVENTS = 10_000

logger = logging.getLogger("ep_runtime_server")


@dataclasses.dataclass(frozen=True)
class Event:
    sequence: int
    wall_s: float
    kind: str
    session_id: str
    group: str
    message: str
    fields: dict[str, Any]


class EventLog:
    """Never given a token or a ticket."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: collections.deque[Event] = collections.deque(maxlen=MAX_EVENTS)
        self._sequence = 0

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
        self._events.append(event)
        logger.log(level, message, extra={"event": event})

    def after(self, sequence: int) -> list[Event]:
        """Events with a larger sequence number, oldest first."""
        return [event for event in self._events if event.sequence > sequence]


class JsonLines(logging.Formatter):
    """One JSON object per line: ts, level, event, message, session, group, fields."""

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


def start_logging(level: str) -> None:
    """JSON lines of `level` and above on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
