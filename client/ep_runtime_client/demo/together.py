"""What the processes of one demo agree on: after which step they stop."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ep_runtime_client.jobs.members import Member


class Stop(Protocol):
    """Who asks the loop to end after the step in flight."""

    @property
    def requested(self) -> bool: ...


class AgreedStop:
    """A request to stop that every process answers at the same place.

    Processes look at `requested` equally often, and a step lies between two looks, in which
    nobody gets ahead of process 0. So process 0, asked to stop, names its next look, does one more
    step, and by the time the others look for that time they can read of it.

    Args:
        stop: the request as this process heard it; only process 0's counts.
        member: this process.
    """

    def __init__(self, stop: Stop, member: Member) -> None:
        self._stop = stop
        self._member = member
        self._word = Path(member.directory) / "stop"
        self._looks = 0
        self._last: int | None = None

    @property
    def requested(self) -> bool:
        if self._member.processes == 1:
            return self._stop.requested
        self._looks += 1
        if self._last is None:
            self._last = self._agreed()
        return self._last is not None and self._looks >= self._last

    def _agreed(self) -> int | None:
        if self._member.index == 0 and self._stop.requested:
            draft = self._word.with_suffix(".draft")
            draft.write_text(str(self._looks + 1))
            draft.rename(self._word)
        try:
            return int(self._word.read_text())
        except FileNotFoundError:
            return None
