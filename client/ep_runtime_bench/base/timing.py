"""Times as every bench does: a warm-up first, subjects in turns, medians."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence


def in_turn(
    subjects: Mapping[str, Callable[[], object]],
    *,
    warmup: int,
    repeats: int,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of every call of every subject.

    Subjects take turns, so that a machine that slows down affects all of them.

    Args:
        subjects: name -> a function to time; it returns when the work is done.
        warmup: untimed calls of each subject.
        repeats: timed calls of each subject.
        before: called untimed before every timed call.
    """
    for subject in subjects.values():
        for _ in range(warmup):
            subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, subject in subjects.items():
            if before is not None:
                before()
            started = time.perf_counter()
            subject()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def quantile(seconds: Sequence[float], share: float) -> float:
    """Returns the smallest sample that `share` of the samples do not exceed."""
    ordered = sorted(seconds)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
