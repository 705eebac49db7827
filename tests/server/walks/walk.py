"""A seeded walk, and what it compares."""

from __future__ import annotations

import collections
import random
from typing import Any

from harness import FakeClock

from ep_runtime import errors
from ep_runtime_server.base.events import EventLog


class Walk:
    """A seeded walk; `seen` counts what came of its steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.events = EventLog(self.clock)
        self.seen: collections.Counter[str] = collections.Counter()

    def agree(self, real: Any, wanted: Any) -> None:
        assert real == wanted, f"the daemon says {real}, the reference {wanted}"

    async def step(self) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        """Leaves nothing behind."""


def outcome(call: Any, *arguments: Any) -> str:
    """The name of the error that the call raises, "ok" where it raises none."""
    try:
        call(*arguments)
    except errors.EpRuntimeError as error:
        return type(error).__name__
    return "ok"
