"""The generations of a job, in its coordination service: a process that comes back reads them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ep_runtime_client.base import jax_internals

_KEY = "ep_runtime/history/"
_PAST, _FINISHED = "past", "finished"


@dataclasses.dataclass(frozen=True)
class History:
    """Incarnations of processes by number, for each generation that is over.

    Attributes:
        finished: the job's loop has ended without a loss.
    """

    past: Sequence[Mapping[int, int]] = ()
    finished: bool = False

    def add(self, members: Mapping[int, int]) -> None:
        """Writes the history with one generation more; all processes write the same."""
        _write([*self.past, members])

    def turn(self, members: Mapping[int, int]) -> int:
        """How often these processes have begun a generation after another set of processes."""
        sets = [*self.past, members]
        began = [now for before, now in itertools.pairwise([{}, *sets]) if now != before]
        return sum(each.keys() == members.keys() for each in began) - 1


def begin() -> None:
    """Writes that a loop begins."""
    _client().key_value_delete(_KEY + _FINISHED)
    _write([])


def finish() -> None:
    """Writes that the loop has ended without a loss."""
    _client().key_value_set(_KEY + _FINISHED, "yes", True)


def read() -> History | None:
    """The job's history; None if no loop has begun."""
    told = {name.rpartition("/")[2]: value for name, value in _client().key_value_dir_get(_KEY)}
    if _PAST not in told:
        return None
    return History([dict(pairs) for pairs in json.loads(told[_PAST])], _FINISHED in told)


def _write(past: Sequence[Mapping[int, int]]) -> None:
    text = json.dumps([list(members.items()) for members in past])
    _client().key_value_set(_KEY + _PAST, text, True)


def _client() -> Any:
    return jax_internals.distributed().client
