"""The values of one scrape, before they are encoded as text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from ep_runtime.board_tallies import BUCKET_BOUNDS_S
from ep_runtime_server.metrics.catalogue import METRICS

# Bounds of histograms: every other bound of the board; the last bucket has no bound.
BOUNDS_S = BUCKET_BOUNDS_S[::2]
SERIES_OF_HISTOGRAM = len(BOUNDS_S) + 3  # plus the bucket without a bound, sum and count


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram's series.

    `counts` has the number of values up to each of BOUNDS_S, then of all values; `sum_s` is the
    sum of the values.
    """

    counts: tuple[int, ...]
    sum_s: float


Row = tuple[tuple[str, ...], float | Histogram]


class Sheet:
    """Series by metric. Callers must ask `fits` to stay below `limit` series."""

    def __init__(self, limit: int) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.size = 0
        self._limit = limit

    def fits(self, more: int) -> bool:
        """Returns whether `more` series stay within the limit."""
        return self.size + more <= self._limit

    def put(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Adds one series; `labels` must be in the catalogue's order."""
        assert len(labels) == len(METRICS[name].labels), name
        self.rows.setdefault(name, []).append((labels, value))
        self.size += 1

    def put_histogram(
        self, name: str, labels: tuple[str, ...], counts: Sequence[int], sum_s: float
    ) -> None:
        """Adds one histogram; `counts` are of the board's buckets."""
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
        """Adds the series of another sheet, without checking the limit."""
        for name, rows in other.rows.items():
            self.rows.setdefault(name, []).extend(rows)
        self.size += other.size
