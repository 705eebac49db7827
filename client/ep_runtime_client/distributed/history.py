"""How far a job's loop is, in its coordination service: a process that comes back reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ep_runtime_client.base import jax_internals

_KEY = "ep_runtime/history/"
_PAST, _FINISHED = "past", "finished"


@dataclasses.dataclass(frozen=True)
class History:
    """The state of the job's loop in the coordination service.

    Attributes:
        past: how many generations are over.
        finished: the loop has ended without a loss.
    """

    past: int = 0
    finished: bool = False

    def add(self) -> None:
        """Writes the history with one generation more; all processes write the same."""
        _write(self.past + 1)


def begin() -> None:
    """Writes that a loop begins."""
    _client().key_value_delete(_KEY + _FINISHED)
    _write(0)


def finish() -> None:
    """Writes that the loop has ended without a loss."""
    _client().key_value_set(_KEY + _FINISHED, "yes", True)


def read() -> History | None:
    """The job's history; None if no loop has begun."""
    told = {name.rpartition("/")[2]: value for name, value in _client().key_value_dir_get(_KEY)}
    if _PAST not in told:
        return None
    return History(int(told[_PAST]), _FINISHED in told)


def _write(past: int) -> None:
    _client().key_value_set(_KEY + _PAST, str(past), True)


def _client() -> Any:
    return jax_internals.distributed().client
