"""Values of one scrape, before they are text."""

from __future__ import annotations

from collections.abc import Iterable

from ep_runtime_server.metrics.catalogue import METRICS

Row = tuple[tuple[str, ...], float]


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
        """One series; `labels` in the catalogue's order."""
        assert len(labels) == len(METRICS[name].labels), name
        self.rows.setdefault(name, []).append((labels, value))
        self.size += 1

    def put_one_of(
        self, name: str, labels: tuple[str, ...], states: Iterable[str], now: str
    ) -> None:
        """A series for each state: 1 for that of now, 0 for the others."""
        for state in states:
            self.put(name, (*labels, state), float(state == now))

    def take(self, other: Sheet) -> None:
        """Adds the series of another sheet, limits or not."""
        for name, rows in other.rows.items():
            self.rows.setdefault(name, []).extend(rows)
        self.size += other.size
