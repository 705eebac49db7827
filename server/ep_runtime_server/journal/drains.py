"""Drain orders: an operator's order lasts over restarts, and a signal's ends the daemon."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ep_runtime.v1 import session_service_pb2
from ep_runtime.wire import duration
from ep_runtime_server.callers.credentials import GivenOrder
from ep_runtime_server.journal import shapes

_RECORD: Mapping[str, shapes.Shape] = {"by": shapes.text, "since_wall_s": shapes.seconds}


@dataclasses.dataclass(frozen=True)
class Drain:
    """The current drain order.

    Attributes:
        by: who gave the first order, and how.
        since_wall_s: when the first order was given.
        held: whether a restarted daemon drains too.
        ends_at_s: when the daemon ends even with sessions, on the monotonic clock; None: never.
        signalled: whether a signal asked for the end, which then cannot be taken back.
    """

    by: str
    since_wall_s: float
    held: bool = False
    ends_at_s: float | None = None
    signalled: bool = False

    def __str__(self) -> str:
        if self.ends_at_s is not None:
            return f"drained {self.by}, and ends with its last session"
        return f"drained {self.by}, until `ep-runtime undrain`"

    def event(self, now_s: float) -> session_service_pb2.DrainEvent:
        """Makes the event that reports the order to sessions."""
        left_s = None if self.ends_at_s is None else max(self.ends_at_s - now_s, 0.0)
        return session_service_pb2.DrainEvent(
            deadline=duration(left_s) if left_s is not None else None
        )

    @property
    def record(self) -> dict[str, Any] | None:
        """Returns the journal's record of the order; None if a restart ends the drain."""
        return {"by": self.by, "since_wall_s": self.since_wall_s} if self.held else None


def ordered(
    before: Drain | None, order: GivenOrder | None, *, wall_s: float, ends_at_s: float | None
) -> Drain:
    """Combines the drain `before` with a new order; `order` is None for a signal."""
    drain = before or Drain(str(order or "by a signal"), wall_s)
    if ends_at_s is None:
        return dataclasses.replace(drain, held=True)
    signalled = drain.signalled or order is None
    return dataclasses.replace(drain, ends_at_s=ends_at_s, signalled=signalled)


def restored(record: Any) -> Drain | None:
    """Restores the drain order of an earlier daemon; None if there was none.

    Raises LookupError, or what `shapes.check` raises.
    """
    if record is None:
        return None
    shapes.check(record, _RECORD)
    return Drain(record["by"], record["since_wall_s"], held=True)
