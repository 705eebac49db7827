"""Values of one scrape, before they are text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from ep_runtime.board_tallies import BUCKET_BOUNDS_S
from ep_runtime_server.metrics.catalogue import METRICS

# Bounds of histograms: each second one of the board's; what is above the last has no bound.
BOUNDS_S = BUCKET_BOUNDS_S[::2]
SERIES_OF_HISTOGRAM = len(BOUNDS_S) + 3  # the one without bound, sum and count


@dataclasses.dataclass(frozen=True)
class Histogram:
    """counts: of what was no more than each of BOUNDS_S, and of all; sum_s: of the values."""

    counts: tuple[int, ...]
    sum_s: float


Row = tuple[tuple[str, ...], float | Histogram]


class Sheet:
    """Series by metric, at most `limit` of them where whoever fills it asks `fits`."""

    def __init__(self, limit: int) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.size = 0
        self._limit = limit

    def fits(self, more: int) -> bool:
        """Whether there is room for so many more series."""
        return self.size + more <= self._limit

    def put(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Adds one series; `labels` in the catalogue's order."""
        assert len(labels) == len(METRICS[name].labels), name
        self.rows.setdefault(name, []).append((labels, value))
        self.size += 1

    def put_histogram(
        self, name: str, labels: tuple[str, ...], counts: Sequence[int], sum_s: float
    ) -> None:
        """Adds one histogram; `counts` by the board's buckets."""
        assert len(labels) == len(METRICS[name].labels), name
        up_to = [*itertools.accumulate(counts)]
        row = Histogram((*up_to[: len(BUCKET_BOUNDS_S) : 2], up_to[-1]), sum_s)
        self.rows.setdefault(name, []).append((labels, row))
        self.size += SERIES_OF_HISTOGRAM

    def put_one_of(
        self, name: str, labels: tuple[str, ...], states: Iterable[str], now: str
    ) -> None:
        """Adds one series per state: 1 for the current state `now`, 0 for the others."""
        for state in states:
            self.put(name, (*labels, state), float(state == now))

    def take(self, other: Sheet) -> None:
        """Adds the series of another sheet, limits or not."""
        for name, rows in other.rows.items():
            self.rows.setdefault(name, []).extend(rows)
        self.size += other.size
